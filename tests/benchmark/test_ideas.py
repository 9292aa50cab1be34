"""The page of what each idea gains has the figures that its command gives on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import ideas
from minisgl.bench.report import table
from minisgl.bench.traces import read_trace


def rows(page: Path) -> set[str]:
    return {line for line in page.read_text().splitlines() if line.startswith("| ")}


def test_the_page_has_the_figures_that_are_found_here(tmp_path: Path) -> None:
    chosen = [one for one in ideas.experiments() if one.idea == "chunk size" or "popular" in one.load]
    found, missing = ideas.measured(chosen)
    assert not missing and len(found) == 3
    page = ideas.write_page(found, tmp_path)
    assert len(rows(page)) > 9 and rows(page) <= rows(ideas.DOCS / "ideas.md")
    for picture in (tmp_path / "img").iterdir():
        assert (ideas.DOCS / "img" / picture.name).is_file()
    itl = {name: one["longest_itl_ms"] for name, one in found[0].by_variant.items()}
    assert itl["512"] < itl["2048"] < itl["16384"]


def test_the_shared_prefixes_are_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "shared.jsonl"
    ideas.write_prefixes(file)
    trace = read_trace(str(file))
    assert len(trace) == ideas.NUM_SHARED and len({one.blocks[0] for one in trace}) == ideas.NUM_PREFIXES


def test_what_cannot_run_is_said_and_no_page_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_DATA", str(tmp_path))
    monkeypatch.setattr(ideas, "experiments", lambda: [one for one in ideas.evictions() if "Mooncake" in one.load])
    monkeypatch.setattr(ideas, "DOCS", tmp_path)
    assert ideas.main(["--page"]) == 1
    assert "Mooncake synthetic" in capsys.readouterr().err and not (tmp_path / "ideas.md").exists()
    assert ideas.main(["--only", "LFU for LRU"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["missing"]) == 4


def test_a_change_from_nothing_is_empty() -> None:
    one = ideas.Experiment(idea="overlap", where="here", load="a load", figures=("cached_share",), run=dict)
    found = ideas.Found(one, {"off": {"cached_share": 0.0}, "on": {"cached_share": 0.5}})
    assert (
        table(ideas.HEAD, found.rows()).splitlines()[-1]
        == "| here: a load | prompt tokens found | off: 0 | on: 0.500 |  |"
    )
