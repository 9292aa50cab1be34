"""Several simulated engines behind the router, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl.bench.simulate import Simulation, simulate
from minisgl.bench.traces import BLOCK, TraceRequest
from minisgl.bench.virtual_fleet import VirtualFleet
from minisgl.bench.virtual_run import VirtualRun, VirtualServer
from minisgl.cli import bench
from minisgl.config import ConfigError, EngineConfig
from minisgl.routing.api import POLICIES
from tests.helpers.bench import lines


@pytest.fixture
def engine(engine: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(engine, cpu_backend="rust_hotpath", max_running_requests=8)


def some(count: int, seed: int = 5, within_s: float = 4.0) -> list[TraceRequest]:
    """Of seven prefixes."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, within_s, count)).tolist()
    lens = rng.integers(1, 2040, (count, 2)).tolist()
    return [
        TraceRequest(at, length, 1 + out % 30, (i % 7, 100 + i % 7, 200 + i, 300 + i)[: -(-length // BLOCK)])
        for i, (at, (length, out)) in enumerate(zip(times, lens, strict=True))
    ]


def arrivals(trace: list[TraceRequest]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([one.arrival_s for one in trace])


def assert_equal(found: VirtualRun, expected: VirtualRun) -> None:
    for name in ("arrival_s", "first_token_s", "last_token_s", "num_tokens", "refused"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    assert (found.end_s, found.engines) == (expected.end_s, expected.engines)


@pytest.mark.parametrize("concurrency", [None, 1, 5])
@pytest.mark.parametrize("host_s", [0.0, 0.003])
def test_one_engine_behind_the_router_does_what_it_does_alone(
    engine: EngineConfig, concurrency: int | None, host_s: float
) -> None:
    """With requests that do not fit, pauses, and a line that grows."""
    trace = [*some(60), TraceRequest(30.0, 3000, 5), *(TraceRequest(60.0 + i / 500, 40, 9) for i in range(20))]
    alone = VirtualServer(engine, len(trace), host_s).run(trace, arrivals(trace), 0, concurrency)
    for policy in POLICIES:
        fleet = VirtualFleet(engine, 1, policy, len(trace), host_s)
        assert_equal(fleet.run(trace, arrivals(trace), 0, concurrency), alone)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_on_one_engine(engine: EngineConfig, policy: str) -> None:
    trace = some(80)
    found = VirtualFleet(engine, 4, policy, len(trace)).run(trace, arrivals(trace), 0)  # type: ignore[arg-type]
    fits = [min(one.output_len, 2048 - one.input_len) for one in trace]
    assert found.num_tokens.tolist() == fits
    assert sum(one.num_requests for one in found.engines) == len(trace) and not found.refused.any()
    assert sum(one.num_tokens for one in found.engines) == found.num_tokens.sum()
    assert (found.first_token_s >= found.arrival_s).all()
    again = VirtualFleet(engine, 4, policy, len(trace)).run(trace, arrivals(trace), 0)  # type: ignore[arg-type]
    assert_equal(again, found)


def test_engines_run_side_by_side(engine: EngineConfig) -> None:
    """Four requests one after the other on one engine with one slot; at once on four."""
    one_slot = msgspec.structs.replace(engine, max_running_requests=1)
    trace = [TraceRequest(0.0, 16, 10)] * 4
    found = VirtualFleet(one_slot, 4, "round_robin", 4).run(trace, arrivals(trace), 0)
    assert found.last_token_s == pytest.approx([0.1] * 4) and [one.num_requests for one in found.engines] == [1] * 4
    alone = VirtualServer(one_slot, 4).run(trace, arrivals(trace), 0)
    assert alone.last_token_s[-1] > 0.39


def test_cache_aware_finds_what_others_compute_again(engine: EngineConfig, tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 2 * BLOCK + 1,
            "output_length": 3,
            "hash_ids": [i * 7 % 12 // 2, 20 + i * 7 % 12 // 2, 100 + i],
        }
        for i in range(120)
    ]
    file = tmp_path / "six.jsonl"
    file.write_text(lines(*rows))
    hits = {}
    for policy in POLICIES:
        small = msgspec.structs.replace(engine, num_pages=250)  # of the 390 that all six need
        settings = Simulation(engine=small, trace=str(file), num_engines=3, routing=policy)
        (found,) = simulate(settings)["runs"]
        hits[policy] = found["hit_rate"]
        assert found["balance"] >= 1 and sum(found["requests_by_engine"]) == 120
    assert hits["cache_aware"] > 0.9 and max(hits["random"], hits["round_robin"], hits["least_load"]) < 0.85


def test_the_command(engine: EngineConfig, mooncake: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trace", mooncake, "--sim-profile", engine.sim_profile, "--num-pages", "400", "--dp", "2"]
    assert bench.main(["simulate", *flags, "--routing", "rr"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["engines"] == 2 and printed["routing"] == "round_robin"
    assert sorted(printed["runs"][0]["requests_by_engine"]) == [1, 2]
    with pytest.raises(ConfigError, match="--dp 0"):
        bench.main(["simulate", *flags, "--dp", "0"])
