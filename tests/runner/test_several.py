"""Several engine processes: one that dies is started again while another runs, after waits that double; the last one's
death is the end. Processes, pool and clock are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import ApiKey, ConfigError, EngineConfig, PrefixFile, Routing, ServerConfig
from minisgl.message.heartbeat import TIMES
from minisgl.routing.api import KeyShare, Policy, RouterConfig
from minisgl.runner import several
from minisgl.runner import several as module
from minisgl.runner.front_end import RULES
from minisgl.runner.several import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    STEADY_S,
    Backoff,
    EngineProcesses,
    num_cuda_devices,
    pool_config,
    shares,
    with_number,
)


class FakeChild:
    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._end: asyncio.Future[int] | None = None
        self.started_over = ""
        self.ended_within: float | None = None
        self.last_words = None

    @property
    def has_ended(self) -> bool:
        return self._end is not None and self._end.done()

    def start(self) -> None:
        self._end = asyncio.get_running_loop().create_future()
        self.started_over = "a stale socket" if Path(self.socket).exists() else "nothing"
        Path(self.socket).touch()

    def die(self, code: int) -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(code)

    def kill(self) -> None:
        self.die(-9)

    async def wait(self) -> int:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def end(self, timeout_s: float) -> None:
        self.ended_within = timeout_s
        self.die(0)  # it had a `Shutdown`


class FakePool:
    def __init__(self) -> None:
        self.said: list[tuple[int, bool]] = []
        self.stopped = False

    def restarting(self, engine: int, yes: bool) -> None:
        self.said.append((engine, yes))

    def readings(self) -> Mapping[str, Any]:
        return {}

    def stop(self) -> None:
        self.stopped = True


class Fleet:
    """`EngineProcesses` of stand-ins. A wait takes no time, but for `held` ones."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.pool = FakePool()
        self.children: list[list[FakeChild]] = [[] for _ in range(number)]
        self.waits: list[float] = []
        self.said: list[str] = []
        self.now = 1000.0
        self.held: asyncio.Event | None = None
        self.engines = EngineProcesses(
            self._make, number, folder, self._make_pool, clock=lambda: self.now, sleep=self._sleep
        )

    def _make(self, engine: int) -> FakeChild:
        child = FakeChild(str(self._folder / f"engine-{engine}"))
        self.children[engine].append(child)
        return child

    def _make_pool(self, sockets: Iterable[str]) -> FakePool:
        assert [Path(one).name for one in sockets] == [f"engine-{at}" for at in range(len(self.children))]
        return self.pool

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        if self.held is not None:
            await self.held.wait()

    def child(self, engine: int) -> FakeChild:
        return self.children[engine][-1]

    async def kill(self, engine: int, code: int = -9) -> None:
        self.child(engine).die(code)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def with_fleet(folder: Path, number: int, work: Callable[[Fleet], Awaitable[None]], *, keep: bool = True) -> Fleet:
    async def run() -> Fleet:
        fleet = Fleet(folder, number)
        fleet.engines.start()
        fleet.engines.open()
        if keep:
            fleet.engines.keep(fleet.said.append)
        await fleet.settle()
        await work(fleet)
        await fleet.engines.stop()
        return fleet

    return asyncio.run(run())


def test_a_dead_engine_is_restarted_without_its_stale_socket(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(1)
        assert [len(made) for made in fleet.children] == [1, 2, 1]
        assert fleet.child(1).started_over == "nothing"
        assert fleet.pool.said == [(1, True)]
        assert fleet.said == ["engine 1 was ended by signal 9: restarting it in 0.1 s"]

    private = tmp_path / "private"
    private.mkdir()
    assert with_fleet(private, 3, work).pool.stopped and not private.exists()


def test_a_restarted_engine_reads_no_prefix_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be gone, and their pages are in its folder."""
    made: list[tuple[str | PrefixFile, ...]] = []
    monkeypatch.setattr(several, "_engine", lambda config, *_: made.append(config.warm_prefixes))
    files = (PrefixFile("manual"),)
    engine = EngineConfig(engine="cpu", cache_dir="cache", warm_prefixes=files, num_pages=40)
    engines = EngineProcesses.create(ServerConfig(engine=engine, dp=2))
    shutil.rmtree(engines.folder)
    engines._make(1)
    assert made == [files, files, ()]


def test_restart_delays_double_and_are_reset_by_readiness(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        for _ in range(9):
            await fleet.kill(0)
        assert fleet.waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
        fleet.engines.heard(0, "ready")
        assert fleet.pool.said[-1] == (0, False)  # nobody need wait for it any more
        fleet.now += STEADY_S - 1
        await fleet.kill(0)
        assert fleet.waits[-1] == 10.0
        fleet.engines.heard(0, "ready")
        fleet.now += STEADY_S
        await fleet.kill(0, code=1)
        assert fleet.waits[-1] == 0.1 and "engine 0 ended with exit code 1" in fleet.said[-1]

    with_fleet(tmp_path, 2, work)


def test_a_silent_engine_is_killed_and_restarted(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        fleet.engines.heard(1, "silent")
        await fleet.settle()
        assert len(fleet.children[1]) == 2 and "signal 9" in fleet.said[0]

    with_fleet(tmp_path, 2, work)


def test_the_death_of_the_last_engine_is_final(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        fleet.held = asyncio.Event()
        await fleet.kill(0)
        await fleet.kill(1)
        assert fleet.pool.said == [(0, True), (0, False), (1, False)]
        fleet.held.set()
        await fleet.settle()
        assert [len(made) for made in fleet.children] == [1, 1]

    with_fleet(tmp_path, 2, work)


def test_an_engine_that_dies_while_another_starts_is_restarted(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)  # its next process runs, and is not ready
        await fleet.kill(1)
        assert [len(made) for made in fleet.children] == [2, 2]

    with_fleet(tmp_path, 2, work)


def test_a_single_engine_is_not_restarted(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)
        assert len(fleet.children[0]) == 1 and fleet.pool.said == [(0, False)]

    with_fleet(tmp_path, 1, work)


def test_a_death_while_engines_load_is_reported(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        waiting = asyncio.ensure_future(fleet.engines.wait())
        await fleet.settle()
        await fleet.kill(2, code=3)
        assert await waiting == 3

    with_fleet(tmp_path, 3, work, keep=False)


def test_an_engine_that_ends_on_purpose_is_not_restarted(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        fleet.engines.leave()
        await fleet.kill(0, code=0)
        assert [len(made) for made in fleet.children] == [1, 1]

    with_fleet(tmp_path, 2, work)


def test_stop_does_not_wait_for_a_starting_engine(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)
        await fleet.engines.stop()
        assert fleet.child(0).has_ended and await fleet.child(0).wait() == -9
        assert await fleet.child(1).wait() == 0

    with_fleet(tmp_path, 2, work)


def test_stop_waits_for_a_restarted_engine_that_is_ready(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)
        fleet.engines.heard(0, "ready")
        await fleet.engines.stop()
        assert await fleet.child(0).wait() == 0  # it ended by itself

    with_fleet(tmp_path, 2, work)


@settings(deadline=None, max_examples=60)
@given(deaths=st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_restart_delays_stay_within_their_bounds(deaths: list[tuple[float, bool]]) -> None:
    """Whatever it lives through: between the two bounds, at most doubled, and the first after a steady time."""
    backoff, now, last = Backoff(), 0.0, 0.0
    for lived, was_ready in deaths:
        backoff.ready_since = since = now if was_ready else None
        now += lived
        wait_s = backoff.after_death(now)
        assert FIRST_WAIT_S <= wait_s <= LONGEST_WAIT_S
        steady = since is not None and now - since >= STEADY_S
        assert wait_s == (FIRST_WAIT_S if steady or not last else min(2 * last, LONGEST_WAIT_S))
        last, now = wait_s, now + wait_s


def test_the_pool_reads_what_the_router_knows() -> None:
    config = ServerConfig(engine=EngineConfig(page_size=4), dp=2, max_inflight=7)
    told = json.loads(pool_config(config, "a", ["b", "c"]))
    assert told["router"].keys() <= asdict(RouterConfig("random", 1)).keys()
    assert told["router"].pop("keys") == []
    assert RouterConfig(**told["router"]) == RouterConfig("cache_aware", 2, page_size=4, max_inflight=7)
    assert told["front_ends"]["max_front_ends"] == RULES.max_front_ends
    assert told["watch"]["silence_s"] == TIMES.silence_s
    assert (told["listen"], told["engines"], told["step_timeout"]) == ("a", ["b", "c"], 300.0)
    assert get_args(Routing) == get_args(Policy)


def test_keys_of_a_file_need_the_pool_and_a_bound_of_what_an_engine_has() -> None:
    """Shares hold where requests wait: not in an engine that takes all of them. A key leaves a row to the others."""
    keys = (ApiKey(name="a", key="x", share=3, max_inflight=5), ApiKey(name="b", key="y"))
    engine = EngineConfig(max_running_requests=8)
    config = ServerConfig(engine=engine, api_keys=keys)
    assert config.needs_pool and not ServerConfig(engine=engine, api_key="z").needs_pool
    router = json.loads(pool_config(config, "a", ["b"]))["router"]
    shares = tuple(KeyShare(**one) for one in router.pop("keys"))
    assert RouterConfig(**router, keys=shares).check() == RouterConfig(
        "cache_aware", 1, max_inflight_per_engine=16, keys=(KeyShare(3, 5), KeyShare(1, 7))
    )
    alone = ServerConfig(engine=engine, api_keys=keys[1:])
    assert json.loads(pool_config(alone, "a", ["b"]))["router"]["keys"] == [{"share": 1, "max_inflight": 0}]
    named = ServerConfig(engine=engine, api_keys=keys, max_inflight_per_engine=3)
    assert json.loads(pool_config(named, "a", ["b"]))["router"]["max_inflight_per_engine"] == 3


@pytest.mark.parametrize(
    ("settings", "there", "most"),
    [
        ({}, True, 512),
        ({}, False, 128),
        ({"device": "cpu"}, True, 128),
        ({"device": "cuda:0"}, False, 512),
        ({"engine": "cpu"}, True, 128),
        ({"activations": "int8"}, True, 128),
        ({"engine": "echo", "device": "cuda"}, True, 128),
        ({"max_running_requests": 9}, True, 18),
    ],
)
def test_the_bound_of_keys_follows_the_rows_of_a_device(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], there: bool, most: int
) -> None:
    monkeypatch.setattr("minisgl.engine.choice.looks_like_cuda", lambda: there)
    config = ServerConfig(engine=EngineConfig(**settings), api_keys=(ApiKey(name="a", key="x"),))
    assert json.loads(pool_config(config, "a", ["b"]))["router"]["max_inflight_per_engine"] == most


def test_without_the_extension_the_error_says_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    monkeypatch.delattr("minisgl._rust", raising=False)
    with pytest.raises(
        ConfigError, match=r"--dp, --max-inflight, --api-key-file: the pool of engines needs the extension"
    ):
        several.pool_class()


CPU = EngineConfig(engine="cpu")


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "DEV", tmp_path)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many devices."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


@pytest.mark.parametrize(
    ("visible", "number"), [("", 0), ("-1", 0), ("0", 1), ("3,1", 2), ("GPU-ab,GPU-cd", 2), ("0,-1,1", 1)]
)
def test_devices_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch, visible: str, number: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_cuda_devices() == number


def test_devices_are_those_that_the_driver_lists(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert num_cuda_devices() == 2
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g.10gb'\n")
    tool.chmod(0o755)
    assert num_cuda_devices() == 1
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert num_cuda_devices() == 2


def test_a_single_engine_gets_the_whole_machine() -> None:
    assert shares(CPU, 1) == ([CPU], "")


@pytest.mark.parametrize(("threads", "number", "each"), [(8, 2, 4), (8, 3, 2), (1, 2, 1), (2, 5, 1)])
def test_threads_and_memory_are_divided(threads: int, number: int, each: int) -> None:
    config = EngineConfig(engine="cpu", num_threads=threads, memory_ratio=0.6)
    found, line = shares(config, number)
    assert [one.num_threads for one in found] == [each] * number
    assert sum(one.memory_ratio or 0 for one in found) == pytest.approx(0.6)
    assert f"{number} engines, {each} of {threads} threads" in line


def test_by_default_the_machine_is_divided() -> None:
    found, _ = shares(EngineConfig(), 2)
    assert {one.num_threads for one in found} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    assert {one.memory_ratio for one in found} == {0.25}


def test_pages_that_are_asked_for_stay_an_engine_s() -> None:
    found, line = shares(EngineConfig(engine="cpu", num_pages=64), 2)
    assert [one.num_pages for one in found] == [64, 64] and "64 pages for each" in line


def test_simulated_engines_share_nothing() -> None:
    config = EngineConfig(engine="echo")
    assert shares(config, 3)[0] == [config] * 3


@pytest.mark.usefixtures("four")
def test_devices_are_dealt_in_order() -> None:
    assert [one.device for one in shares(EngineConfig(), 4)[0]] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    found, line = shares(EngineConfig(tp=2, engine="torch"), 2)
    assert [one.device for one in found] == ["cuda:0", "cuda:2"] and "2 devices each" in line
    assert [one.num_threads for one in found] == [None, None]


@pytest.mark.usefixtures("four")
def test_more_engines_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--dp 3: needs 6 CUDA devices \(2 each\), there are 4: .*at most --dp 2"):
        shares(EngineConfig(tp=2), 3)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("config", [CPU, EngineConfig(device="cpu"), EngineConfig(quantization="q8")])
def test_a_cpu_is_divided_beside_devices_too(config: EngineConfig) -> None:
    assert {one.device for one in shares(config, 8)[0]} == {config.device}


@pytest.mark.parametrize(
    ("config", "number"),
    [(EngineConfig(), 4), (EngineConfig(tp=2), 2), (EngineConfig(tp=3), 1), (CPU, 1), (EngineConfig(engine="echo"), 1)],
)
@pytest.mark.usefixtures("four")
def test_auto_is_one_engine_per_group_of_devices(config: EngineConfig, number: int) -> None:
    assert with_number(ServerConfig(engine=config, dp="auto").check()).dp == number


def test_auto_without_devices_is_one_engine() -> None:
    found = with_number(ServerConfig(engine=EngineConfig(), dp="auto"))
    assert found.dp == 1 and not found.needs_pool


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp": 0}, "--dp 0: must be at least 1"),
        ({"max_inflight": 0}, "--max-inflight 0: must be at least 1"),
        ({"max_inflight_per_engine": -1}, "--max-inflight-per-engine -1: must be at least 1"),
        ({"dp": 2, "engine": EngineConfig(device="cuda:1")}, "--device cuda:1: cannot be used with --dp 2"),
        ({"dp": 2, "engine": EngineConfig(tp="auto")}, "--tp auto: cannot be used with --dp 2: give --tp a number"),
        ({"dp": "auto", "engine": EngineConfig(device="cuda:1")}, "--device cuda:1: cannot be used with --dp auto"),
        ({"dp": 2, "engine": EngineConfig.of({"record_trace": "f"})}, "--record-trace f: cannot be used with --dp 2"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        ServerConfig(**{"engine": EngineConfig(), **settings}).check()  # type: ignore[arg-type]


def test_one_engine_without_limits_needs_no_pool() -> None:
    config = ServerConfig(engine=EngineConfig())
    assert not config.needs_pool
    assert all(
        ServerConfig(engine=config.engine, **one).needs_pool  # type: ignore[arg-type]
        for one in ({"dp": 2}, {"max_inflight": 1}, {"max_inflight_per_engine": 1})
    )
