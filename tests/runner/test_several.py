"""Several engine processes: one that dies is started again while another runs, after waits that double; the last one's
death is the end. Processes, pool and clock are stand-ins."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.config import ApiKey, ConfigError, EngineConfig, Routing, ServerConfig
from minisgl.routing.api import KeyShare, Policy, RouterConfig
from minisgl.runner import several
from minisgl.runner.several import FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S, Backoff, EngineProcesses, pool_config


class FakeChild:
    def __init__(self, socket: str) -> None:
        self.socket = socket
        self._end: asyncio.Future[int] | None = None
        self.started_over = ""
        self.ended_within: float | None = None
        self.last_words = ""

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


def test_one_that_dies_is_started_again_without_its_stale_socket(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(1)
        assert [len(made) for made in fleet.children] == [1, 2, 1]
        assert fleet.child(1).started_over == "nothing"
        assert fleet.pool.said == [(1, True)]
        assert fleet.said == ["engine 1 was ended by signal 9: it is started again in 0.1 s"]

    private = tmp_path / "private"
    private.mkdir()
    assert with_fleet(private, 3, work).pool.stopped and not private.exists()


def test_waits_double_and_begin_anew_after_it_was_ready_for_a_while(tmp_path: Path) -> None:
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


def test_a_silent_one_is_killed_and_started_again(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        fleet.engines.heard(1, "silent")
        await fleet.settle()
        assert len(fleet.children[1]) == 2 and "signal 9" in fleet.said[0]

    with_fleet(tmp_path, 2, work)


def test_the_last_one_s_death_is_the_end(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        fleet.held = asyncio.Event()
        await fleet.kill(0)
        await fleet.kill(1)
        assert fleet.pool.said == [(0, True), (0, False), (1, False)]
        fleet.held.set()
        await fleet.settle()
        assert [len(made) for made in fleet.children] == [1, 1]

    with_fleet(tmp_path, 2, work)


def test_one_that_dies_while_another_is_starting_comes_back(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)  # its next process runs, and is not ready
        await fleet.kill(1)
        assert [len(made) for made in fleet.children] == [2, 2]

    with_fleet(tmp_path, 2, work)


def test_the_only_one_is_not_started_again(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)
        assert len(fleet.children[0]) == 1 and fleet.pool.said == [(0, False)]

    with_fleet(tmp_path, 1, work)


def test_a_death_while_they_load_is_told(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        waiting = asyncio.ensure_future(fleet.engines.wait())
        await fleet.settle()
        await fleet.kill(2, code=3)
        assert await waiting == 3

    with_fleet(tmp_path, 3, work, keep=False)


def test_what_ends_on_purpose_is_not_started_again(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        fleet.engines.leave()
        await fleet.kill(0, code=0)
        assert [len(made) for made in fleet.children] == [1, 1]

    with_fleet(tmp_path, 2, work)


def test_stop_does_not_wait_for_one_that_is_starting(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)
        await fleet.engines.stop()
        assert fleet.child(0).has_ended and await fleet.child(0).wait() == -9
        assert await fleet.child(1).wait() == 0

    with_fleet(tmp_path, 2, work)


def test_stop_waits_for_one_that_is_ready_again(tmp_path: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.kill(0)
        fleet.engines.heard(0, "ready")
        await fleet.engines.stop()
        assert await fleet.child(0).wait() == 0  # it ended by itself

    with_fleet(tmp_path, 2, work)


@settings(deadline=None, max_examples=60)
@given(deaths=st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_waits_stay_in_their_bounds(deaths: list[tuple[float, bool]]) -> None:
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
    assert (told["listen"], told["engines"], told["step_timeout"]) == ("a", ["b", "c"], 300.0)
    assert get_args(Routing) == get_args(Policy)


def test_keys_of_a_file_need_the_pool_and_a_bound_of_what_an_engine_has() -> None:
    """Shares hold where requests wait: not in an engine that takes all of them."""
    keys = (ApiKey(name="a", key="x", share=3, max_inflight=5), ApiKey(name="b", key="y"))
    engine = EngineConfig(max_running_requests=8)
    config = ServerConfig(engine=engine, api_keys=keys)
    assert config.needs_pool and not ServerConfig(engine=engine, api_key="z").needs_pool
    router = json.loads(pool_config(config, "a", ["b"]))["router"]
    shares = tuple(KeyShare(**one) for one in router.pop("keys"))
    assert RouterConfig(**router, keys=shares).check() == RouterConfig(
        "cache_aware", 1, max_inflight_per_engine=16, keys=(KeyShare(3, 5), KeyShare(1, 0))
    )
    named = ServerConfig(engine=engine, api_keys=keys, max_inflight_per_engine=3)
    assert json.loads(pool_config(named, "a", ["b"]))["router"]["max_inflight_per_engine"] == 3


def test_without_the_extension_the_error_says_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    monkeypatch.delattr("minisgl._rust", raising=False)
    with pytest.raises(ConfigError, match=r"--dp, --max-inflight, --api-key-file: need the extension"):
        several.pool_class()
