"""Single operations of the prefix cache hold their bars, and traces go through both schedulers alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import scheduler
from minisgl.bench.traces import BLOCK, TraceRequest
from minisgl.scheduler.api import ControlPlaneConfig

A = TraceRequest(0, 3 * BLOCK, 4, (1, 2, 3))
B = TraceRequest(0.04, 2 * BLOCK + 7, 4, (1, 2, 4))  # two blocks of A
C = TraceRequest(0.04, 3 * BLOCK, 4, (1, 2, 3))
D = TraceRequest(0.095, 2 * BLOCK, 4, (8, 9))


def test_a_missed_bar_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "times", lambda name, repeats: [scheduler.BARS[name] + 0.1] * repeats)
    assert scheduler.main(["tree", "--out", str(tmp_path / "found.json")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["evict_one"] == pytest.approx(0.7)
    assert json.loads((tmp_path / "found.json").read_text())["us"]["match_1024"]["p99"] > 0
    assert scheduler.main(["tree", "--gate"]) == 1


def test_a_build_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scheduler, "CARGO", ("git", "no-such-subcommand"))
    assert scheduler.main(["tree"]) == 2
    assert "no-such-subcommand" in capsys.readouterr().err


def test_requests_come_at_their_times() -> None:
    steps = [[place for place, _ in one] for one in scheduler.due([A, B, C, D], step_ms=30)]
    assert steps == [[0], [], [1, 2], [], [3]]


def test_a_trace_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_DATA", str(tmp_path))
    assert scheduler.main(["traces", "--trace", "azure-code"]) == 2
    assert "azure-code" in capsys.readouterr().err


def test_both_schedulers_decide_alike() -> None:
    config = ControlPlaneConfig(256, 16, 2, 512, 131_072)
    found = scheduler.parity("made up", [A, B, C, D], config, step_ms=30)
    assert (found["requests"], found["divergences"]) == (4, 0)
    assert found["steps"] > 10 and found["prompt_tokens"] == A.input_len + B.input_len + C.input_len + D.input_len
