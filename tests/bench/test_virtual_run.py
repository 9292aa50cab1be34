"""A trace in virtual time: when each request starts and ends, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl.bench.traces import TraceRequest
from minisgl.bench.virtual_run import VirtualRun, VirtualServer
from minisgl.config import EngineConfig

PROFILE = {"name": "ten-ms", "table": {"rows": [1], "prefill_tokens": [0], "kv_len": [1], "ms": [[[10]]]}}


@pytest.fixture
def engine(tmp_path: Path) -> EngineConfig:
    file = tmp_path / "ten-ms.yaml"
    file.write_text(json.dumps(PROFILE))
    return EngineConfig(engine="sim", sim_profile=str(file), cpu_backend="python", num_pages=400, max_seq_len=2048)


def run(config: EngineConfig, *requests: TraceRequest, host_s: float = 0.0) -> VirtualRun:
    arrivals = np.array([one.arrival_s for one in requests])
    return VirtualServer(config, len(requests), host_s).run(requests, arrivals, seed=0)


def test_an_arrival_in_the_middle_of_a_step_waits_for_the_next_free_plan(engine: EngineConfig) -> None:
    """With overlap the step after the running one is planned already."""
    requests = TraceRequest(0.0, 8, 20), TraceRequest(0.005, 8, 3)
    ahead = run(engine, *requests)
    assert ahead.first_token_s == pytest.approx([0.01, 0.03]) and ahead.last_token_s == pytest.approx([0.20, 0.05])
    plain = run(msgspec.structs.replace(engine, overlap=False), *requests)
    assert plain.first_token_s == pytest.approx([0.01, 0.02]) and plain.last_token_s == pytest.approx([0.20, 0.04])
    assert plain.num_tokens.tolist() == ahead.num_tokens.tolist() == [20, 3]


def test_idle_time_passes_at_once(engine: EngineConfig) -> None:
    found = run(engine, TraceRequest(0.0, 8, 2), TraceRequest(1000.0, 8, 2))
    assert found.first_token_s == pytest.approx([0.01, 1000.01])
    assert found.end_s == pytest.approx(1000.02) and found.engines[0].busy_s == pytest.approx(0.04)
    assert found.engines[0].num_steps < 20


def test_a_slow_host_shows_only_without_overlap_or_above_the_step(engine: EngineConfig) -> None:
    request = TraceRequest(0.0, 8, 21)
    assert run(engine, request, host_s=0.004).end_s == pytest.approx(0.21, abs=0.01)
    alone = msgspec.structs.replace(engine, overlap=False)
    assert run(alone, request, host_s=0.004).last_token_s[0] == pytest.approx(21 * 0.014)
