"""Production traces: what is read, when it comes, what the prefix cache must find in it. These are made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmark.control_plane import hit_rates, traces
from benchmark.control_plane.trace_data import BLOCK, Request, due, prompt_maker, read_requests
from minisgl.scheduler.api import ControlPlaneConfig

A = Request(0, 3 * BLOCK, 4, (1, 2, 3))
B = Request(40, 2 * BLOCK + 7, 4, (1, 2, 4))  # two blocks of A
C = Request(40, 3 * BLOCK, 4, (1, 2, 3))  # the whole of A: the last page is computed again
D = Request(95, 2 * BLOCK, 4, (8, 9))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_DATA", str(tmp_path))
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces"


def test_mooncake_is_read(data: Path) -> None:
    line = {"timestamp": 40, "input_length": 1031, "output_length": 0, "hash_ids": [1, 2, 4]}
    (data / "mooncake_conversation.jsonl").write_text(json.dumps(line) + "\n")
    assert read_requests("mooncake_conversation") == [Request(40, 1031, 1, (1, 2, 4))]


def test_azure_is_read(data: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:05.0319600,3,8\n"
    )
    (data / "azure2023_code.csv").write_text(text)
    assert read_requests("azure_code") == [Request(0, 48, 10), Request(1052, 3, 8)]
    assert len(read_requests("azure_code", 1)) == 1


@pytest.mark.usefixtures("data")
def test_missing_data_is_said() -> None:
    with pytest.raises(SystemExit, match="MINISGL_DATA"):
        read_requests("azure_code")


def test_requests_come_at_their_times() -> None:
    steps = [[place for place, _ in one] for one in due([A, B, C, D], step_ms=30)]
    assert steps == [[0], [], [1, 2], [], [3]]


def test_equal_blocks_are_equal_tokens() -> None:
    make = prompt_maker()
    a, b, d = make(0, A), make(1, B), make(3, D)
    assert len(b) == B.input_len and np.array_equal(a[: 2 * BLOCK], b[: 2 * BLOCK])
    assert not np.array_equal(a[2 * BLOCK :][:7], b[2 * BLOCK :]) and not np.array_equal(a[:BLOCK], d[:BLOCK])
    lengths_only = [make(place, Request(0, 50, 1)) for place in range(2)]
    assert lengths_only[0][0] != lengths_only[1][0]


def test_with_room_the_cache_finds_the_whole_blocks_seen_before() -> None:
    found = hit_rates.unlimited([A, B, C, D])
    total = A.input_len + B.input_len + C.input_len + D.input_len
    assert found["by_whole_blocks"] == 5 * BLOCK / total and found["published_by_blocks"] == 5 / 11
    assert found["recomputed_last_pages"] == BLOCK / total and found["unaccounted_tokens"] == 0
    assert found["found"] == 4 * BLOCK / total


@pytest.mark.parametrize("backend", ["python", "rust_hotpath"])
def test_small_pools_find_less(backend: str) -> None:
    requests = [A, D, Request(99, 3 * BLOCK + 7, 1, (1, 2, 3, 5))]
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
