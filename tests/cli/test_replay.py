"""`minisgl replay`: comparing and timing backends over a trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl import cli
from minisgl.cli import replay_run
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, Stats, TreeView
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import BACKENDS
from minisgl.scheduler.wrapped import WrappedControlPlane, make_faulty
from tests.replay.record import CORPUS

TRACE = str(CORPUS / "short-page4-lfu.trace.gz")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, all that was printed, the last line."""
    code = cli.main(["replay", *arguments])
    text = capsys.readouterr().out
    return code, text, json.loads(text.splitlines()[-1])


def with_other_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of these knows another end of sequence."""

    def make(name: str, config: ControlPlaneConfig) -> ControlPlane:
        if name == "python":
            fields = {field: getattr(config, field) for field in config.__slots__} | {"eos_ids": (7,)}
            config = ControlPlaneConfig(**fields)
        return make_control_plane(name, config)

    monkeypatch.setattr(replay_run, "make_control_plane", make)


def test_both_backends_agree_and_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, report = run(capsys, TRACE, "--backend", "python", "--backend", "rust_hotpath", "--repeat", "3")
    assert code == 0 and report["first_difference"] is None and report["errors"] == {}
    assert list(report["us_per_step"]) == ["python", "rust_hotpath"] and all(report["us_per_step"].values())
    assert text.count("on average (medians: schedule") == 2
    assert re.search(r"^equal: \d+ steps, \d+ calls, every plan, array and count, and the tree", text, re.M)


def test_repeated_backend_is_driven_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, report = run(capsys, TRACE, "--backend", "rust_hotpath", "--backend", "rust_hotpath")
    assert code == 0 and list(report["us_per_step"]) == ["rust_hotpath"]


def test_parts_in_rust_are_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["rust_hotpath", "rust_parts:radix,metadata"]
    code, text, report = run(capsys, TRACE, "--backend", names[0], "--backend", names[1])
    assert code == 0 and list(report["us_per_step"]) == names and "equal: " in text


def test_an_unknown_backend_is_refused_with_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["replay", TRACE, "--backend", "fortran"])
    assert code == 2 and "--backend fortran: unknown scheduler 'fortran'; valid: python" in capsys.readouterr().err


def test_backends_are_both_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(run(capsys, TRACE)[2]["us_per_step"]) == BACKENDS


def test_the_first_difference_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_other_ends(monkeypatch)
    code, text, report = run(capsys, TRACE)
    assert code == 1 and report["first_difference"] > 0
    assert f"differ first in call {report['first_difference']}: commit(" in text and "\nequal" not in text
    assert report["what"].startswith("output.")
    said = re.search(r"^the first, in commit\(\d+\): (\S+)\[\d+\], request (\d+)$", text, re.M)
    assert said is not None and (said[1], int(said[2])) == (report["what"], report["request"])
    assert re.search(r"^  rust_hotpath \S.*\n  python       \S.*\nthe calls up to it:\n  schedule\(", text, re.M)


class OtherCounts(WrappedControlPlane):
    """A scheduler with the decisions of another one, whose counts or tree are different."""

    def __init__(self, inner: ControlPlane, what: str) -> None:
        super().__init__(inner)
        self._what = what

    def stats(self) -> Stats:
        found = super().stats()
        return replace(found, num_hits_total=found.num_hits_total + 1) if self._what == "stats" else found

    def tree_view(self, limit: int) -> TreeView:
        num_nodes, num_tokens, nodes = super().tree_view(limit)
        return (num_nodes, num_tokens, nodes[1:]) if self._what == "tree" else (num_nodes, num_tokens, nodes)


@pytest.mark.parametrize(("what", "said"), [("stats", "stats.num_hits_total"), ("tree", "tree.nodes[15]")])
def test_counts_and_trees_are_compared(
    what: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(name: str, config: ControlPlaneConfig) -> ControlPlane:
        plane = make_control_plane(name, config)
        return OtherCounts(plane, what) if name == "python" else plane

    monkeypatch.setattr(replay_run, "make_control_plane", make)
    code, text, report = run(capsys, TRACE)
    assert (code, report["what"]) == (1, said)
    assert (report["first_difference"] == report["calls"] - 1) == (what == "tree") and f": {said}\n" in text


def test_a_backend_that_fails_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def make(name: str, config: ControlPlaneConfig) -> ControlPlane:
        plane = make_control_plane(name, config)
        return make_faulty(plane, "commit:9:before") if name == "rust_hotpath" else plane

    monkeypatch.setattr(replay_run, "make_control_plane", make)
    code, text, report = run(capsys, TRACE)
    assert code == 1 and "rust_hotpath: commit(9) failed" in text and "on order" in report["errors"]["rust_hotpath"]
    assert "differ first in call" in text
    assert run(capsys, TRACE, "--backend", "rust_hotpath")[0] == 1


@pytest.mark.parametrize("arguments", [[], [TRACE, "--report", "x"], [TRACE, "--repeat", "0"], ["--report", "missing"]])
def test_invalid_arguments_are_rejected(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_archive_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_bytes(Path(TRACE).read_bytes()[:-20])
    assert cli.main(["replay", str(tmp_path / "trace")]) == 2
    assert capsys.readouterr().err.startswith("minisgl replay: trace: ")
