"""A shadow beside the scheduler that serves: what it reports, and that it disturbs nobody."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.config import DebugConfig, EngineConfig
from minisgl.runner.build import build_engine, choose_control_plane
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.shadow import ShadowControlPlane
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import Events
from tests.helpers.scheduler import arrival
from tests.scheduler.test_trace import CONFIG, load


def test_a_shadow_that_agrees_has_nothing_to_report(tmp_path: Path) -> None:
    report = tmp_path / "report"
    planes = (make_control_plane("rust_hotpath", CONFIG), make_control_plane("python", CONFIG))
    plane = ShadowControlPlane(*planes, report=report)
    load(plane)
    plane.compare_trees()
    assert plane.summary.num_equal == 120 and plane.summary.num_diffs == 0 and not report.exists()


def test_a_shadow_that_differs_is_reported_and_finally_dropped(tmp_path: Path) -> None:
    report = tmp_path / "report"
    other = ControlPlaneConfig(24, 4, 4, 16, 64, (1,), graph_sizes=(1, 2, 4))  # another end of sequence
    plane = ShadowControlPlane(
        make_control_plane("python", CONFIG),
        make_control_plane("python", other),
        report=report,
        max_diffs=5,
        notify=(told := list[str]()).append,
    )
    load(plane)
    assert len(told) == 2 and "first difference in commit(" in told[0] and "shadow: dropped: " in told[1]
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(lines) >= 5 and "5 differences" in plane.summary.stopped
    assert lines[0]["what"].startswith("output.") and lines[0]["trail"][-1]["call"] == "commit"


def test_first_difference_of_a_plan_names_its_request() -> None:
    planes = [make_control_plane("python", replace(CONFIG, max_prefill_length=length)) for length in (16, 8)]
    plane = ShadowControlPlane(planes[0], planes[1])
    plane.schedule(0, Events([arrival(31, list(range(5))), arrival(32, list(range(10, 22)))]))
    first = plane.summary.first
    assert first is not None
    assert [first[name] for name in ("what", "primary", "shadow", "request")] == ["plan.num_rows", 2, 1, 32]


def test_one_step_of_several_is_compared() -> None:
    planes = (make_control_plane("rust_hotpath", CONFIG), make_control_plane("python", CONFIG))
    plane = ShadowControlPlane(*planes, every_n=4)
    load(plane)
    assert (plane.summary.num_equal, plane.summary.num_calls) == (30, 120)


def test_a_shadow_that_fails_does_not_disturb() -> None:
    plane = ShadowControlPlane(
        make_control_plane("python", CONFIG), make_faulty(make_control_plane("python", CONFIG), "commit:9:after")
    )
    load(plane)
    assert "on order" in plane.summary.stopped and plane.stats() is not None
    found = plane.summary
    assert (found.num_equal, found.num_different, found.num_failed) == (19, 0, 1)


def test_without_the_extension_a_shadow_compares_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    monkeypatch.delattr("minisgl._rust", raising=False)
    config = EngineConfig(engine="echo", num_pages=16, debug=DebugConfig(shadow=True))
    engine = build_engine(config, lambda *report: None)
    told: list[str] = []
    chosen = choose_control_plane(config, engine.info, told.append)
    engine.close()
    assert chosen.name == "python" and not isinstance(chosen.control_plane, ShadowControlPlane)
    assert len(told) == 1 and "nothing is compared: extension missing" in told[0]
