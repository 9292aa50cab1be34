"""Production traces through the schedulers: when requests come, what the prefix cache must find. These are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.scheduler import hit_rates, traces
from minisgl.bench.traces import BLOCK, TraceRequest
from minisgl.config import ConfigError
from minisgl.scheduler.api import ControlPlaneConfig

A = TraceRequest(0, 3 * BLOCK, 4, (1, 2, 3))
B = TraceRequest(0.04, 2 * BLOCK + 7, 4, (1, 2, 4))  # two blocks of A
C = TraceRequest(0.04, 3 * BLOCK, 4, (1, 2, 3))  # the whole of A: the last page is computed again
D = TraceRequest(0.095, 2 * BLOCK, 4, (8, 9))


def test_requests_come_at_their_times() -> None:
    steps = [[place for place, _ in one] for one in traces.due([A, B, C, D], step_ms=30)]
    assert steps == [[0], [], [1, 2], [], [3]]


def test_a_trace_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINISGL_DATA", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["traces", "--trace", "azure-code"])
    with pytest.raises(ConfigError, match="azure-code"):
        traces.main()


def test_with_room_the_cache_finds_the_whole_blocks_seen_before() -> None:
    found = hit_rates.unlimited([A, B, C, D])
    total = A.input_len + B.input_len + C.input_len + D.input_len
    assert found["by_whole_blocks"] == 5 * BLOCK / total and found["published_by_blocks"] == 5 / 11
    assert found["recomputed_last_pages"] == BLOCK / total and found["unaccounted_tokens"] == 0
    assert found["found"] == 4 * BLOCK / total


@pytest.mark.parametrize("backend", ["python", "rust_hotpath"])
def test_small_pools_find_less(backend: str) -> None:
    requests = [A, D, TraceRequest(0.099, 3 * BLOCK + 7, 1, (1, 2, 3, 5))]
    assert hit_rates.radix(requests, 16, "lru", backend) == 3 * BLOCK
    assert hit_rates.radix(requests, 4, "lru", backend) == 2 * BLOCK  # D has displaced the end of A


def test_the_plain_lru_forgets_the_oldest() -> None:
    assert hit_rates.lru_runs([(1, 2, 3), (1, 2, 3)], 3) == 3
    assert hit_rates.lru_runs([(1, 2, 3), (4,), (1, 2, 3)], 3) == 0  # 1 is gone, so the run is broken
    assert hit_rates.lru_runs([(1, 2, 3), (4,), (1, 2, 3)], 4) == 3


def test_both_control_planes_decide_alike() -> None:
    config = ControlPlaneConfig(256, 16, 2, 512, 131_072)
    found = traces.parity("made up", [A, B, C, D], config, step_ms=30)
    assert (found["requests"], found["divergences"]) == (4, 0)
    assert found["steps"] > 10 and found["prompt_tokens"] == A.input_len + B.input_len + C.input_len + D.input_len
    assert min(found["control_plane_seconds"].values()) > 0
