"""What each idea gains: exact experiments give what the idea says, and the page says what the raw data says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.ideas import __main__ as ideas
from benchmark.ideas.experiments import Experiment, Samples, experiments, in_turns
from minisgl.bench.report import read_raw
from minisgl.config import ConfigError

RECORDED = Path(__file__).resolve().parents[2] / "benchmark" / "runs" / "2026-11-23-ideas"


def pretended(rounds: int, quick: bool) -> Samples:
    return in_turns(["off", "on"], rounds, lambda name: {"output_tok_s": 100.0 if name == "off" else 125.0, "x": 1.0})


def breaking(rounds: int, quick: bool) -> Samples:
    raise ConfigError("no such trace")


TIMED = Experiment(idea="overlap", where="here", load="a load", figures=("output_tok_s",), run=pretended)


def test_turns_go_there_and_back() -> None:
    asked: list[str] = []
    in_turns(["a", "b"], 3, lambda name: asked.append(name) or {})  # type: ignore[func-returns-value]
    assert asked == ["a", "b", "b", "a", "a", "b"]


def test_the_report_has_changes_and_who_could_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ideas, "experiments", lambda: [TIMED, replace(TIMED, load="none", run=breaking)])
    assert ideas.main(["--out", str(tmp_path), "--rounds", "3"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["experiments"] == 1 and last["missing"] == {"overlap, here, none": "no such trace"}
    report = (tmp_path / "README.md").read_text()
    assert "| here: a load | tokens per second | off: 100 | on: 125 | +25.0 % [+25.0, +25.0] |" in report
    assert "| overlap, here, none | no such trace |" in report
    assert "<svg" in (tmp_path / "overlap.svg").read_text()


def test_one_round_has_no_interval_and_an_exact_one_says_so() -> None:
    for exact, said in ((False, "+25.0 %"), (True, "+25.0 %, exact")):
        (result,) = ideas.measured([replace(TIMED, exact=exact)], 1, False)
        (row,) = ideas.rows_of(result["experiments"][0])
        assert row[-1] == said


def test_what_was_measured_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ideas, "experiments", lambda: [TIMED])
    ideas.main(["--out", str(tmp_path), "--rounds", "2"])
    monkeypatch.setattr(ideas, "experiments", lambda: [replace(TIMED, run=breaking), replace(TIMED, load="another")])
    assert ideas.main(["--out", str(tmp_path), "--rounds", "2", "--resume"]) == 0
    result = read_raw(tmp_path)["result"]
    assert [one["load"] for one in result["experiments"]] == ["a load", "another"] and result["missing"] == {}


def exact_one(idea: str, load: str) -> Any:
    (one,) = [one for one in experiments() if one.exact and one.idea == idea and load in one.load]
    samples = one.run(1, True)
    return {name: runs[0] for name, runs in samples.items()}


def test_small_chunks_keep_tokens_coming_in_virtual_time() -> None:
    found = exact_one("chunk size", "among")
    assert found["512"]["longest_itl_ms"] < found["2048"]["longest_itl_ms"] < found["16384"]["longest_itl_ms"]


def test_a_popular_prompt_outlives_others_by_frequency() -> None:
    found = exact_one("LFU for LRU", "popular prompts among others, 204,800")
    assert 0 < found["lru"]["cached_share"] < found["lfu"]["cached_share"]


@pytest.mark.skipif(not RECORDED.exists(), reason="no recorded run in this checkout")
def test_the_page_is_made_from_the_recorded_run(tmp_path: Path) -> None:
    page = ideas.write_page(read_raw(RECORDED), RECORDED.name, tmp_path)
    assert page.read_text() == (ideas.ROOT / "docs" / "ideas.md").read_text()
    made = {file.name for file in (tmp_path / "img").iterdir()}
    assert made <= {file.name for file in (ideas.ROOT / "docs" / "img").iterdir()} and made
