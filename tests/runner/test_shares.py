"""What each of several engines gets of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl.config import ConfigError, EngineConfig, ServerConfig
from minisgl.runner import shares as module
from minisgl.runner.shares import num_cuda_devices, shares, with_number

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


def test_one_engine_gets_all() -> None:
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
def test_auto_is_as_many_as_there_are_devices_for(config: EngineConfig, number: int) -> None:
    assert with_number(ServerConfig(engine=config, dp="auto").check()).dp == number


def test_auto_without_devices_is_one() -> None:
    found = with_number(ServerConfig(engine=EngineConfig(), dp="auto"))
    assert found.dp == 1 and not found.needs_pool


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dp": 0}, "--dp 0: must be at least 1, or auto"),
        ({"max_inflight": 0}, "--max-inflight 0: must be at least 1"),
        ({"max_inflight_per_engine": -1}, "--max-inflight-per-engine -1: must be at least 1"),
        ({"dp": 2, "engine": EngineConfig(device="cuda:1")}, "--device cuda:1: not with --dp 2"),
        ({"dp": "auto", "engine": EngineConfig(device="cuda:1")}, "--device cuda:1: not with --dp auto"),
        ({"dp": 2, "engine": EngineConfig.of({"record_trace": "f"})}, "--record-trace f: not with --dp 2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        ServerConfig(**{"engine": EngineConfig(), **settings}).check()  # type: ignore[arg-type]


def test_one_engine_without_limits_needs_no_pool() -> None:
    config = ServerConfig(engine=EngineConfig())
    assert not config.needs_pool
    assert all(
        ServerConfig(engine=config.engine, **one).needs_pool  # type: ignore[arg-type]
        for one in ({"dp": 2}, {"max_inflight": 1}, {"max_inflight_per_engine": 1})
    )
