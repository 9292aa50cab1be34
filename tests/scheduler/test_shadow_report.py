"""`minisgl replay --report`: the summary of a shadow's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import cli
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.shadow import ShadowControlPlane, summarize_report
from minisgl.step import Arrival, Events

CONFIG = ControlPlaneConfig(24, 4, 4, 16, 64, (2,))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, all that was printed, the last line."""
    code = cli.main(["replay", *arguments])
    text = capsys.readouterr().out
    return code, text, json.loads(text.splitlines()[-1])


def report_of(path: Path, eos: int = 1) -> None:
    other = ControlPlaneConfig(24, 4, 4, 16, 64, (eos,))
    plane = ShadowControlPlane(make_control_plane("python", CONFIG), make_control_plane("python", other), report=path)
    for step in range(6):
        events = Events([Arrival(0, np.arange(5, dtype=np.int32), 5, 20)] if step == 0 else [])
        plan = plane.schedule(step, events)
        plane.commit(step, np.full(plan.num_rows, 1 if step > 2 else 5, np.int32))


def test_a_report_is_summarized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_of(tmp_path / "report")
    num_lines = len((tmp_path / "report").read_text().splitlines())
    code, text, report = run(capsys, "--report", str(tmp_path / "report"))
    assert code == 1 and report["differences"] == num_lines == sum(report["what"].values())
    assert report["first"] == "commit(3)" and report["what"]["output.reasons"] == 1
    assert "the first, in commit(3): output.reasons[0], request 0\n" in text
    assert "\n  primary 0 (length 1)\n  shadow  1 (length 1)\nthe calls up to it:\n" in text
    assert "schedule(3) []" in text


def test_a_report_that_was_cut_off_is_read_up_to_the_cut(tmp_path: Path) -> None:
    report_of(tmp_path / "report")
    whole = summarize_report(tmp_path / "report")
    (tmp_path / "cut").write_bytes((tmp_path / "report").read_bytes()[:-3])
    assert summarize_report(tmp_path / "cut").num_diffs == whole.num_diffs - 1


def test_an_empty_report_has_no_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report").touch()
    code, _, report = run(capsys, "--report", str(tmp_path / "report"))
    assert code == 0 and report == {"differences": 0, "what": {}, "first": None}


@pytest.mark.parametrize("text", ["nothing\n{}\n", "[1]\n", '{"what": 1}\n'])
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report").write_text(text)
    assert cli.main(["replay", "--report", str(tmp_path / "report")]) == 2
    assert "report: line 1" in capsys.readouterr().err
