"""Single operations of the prefix cache: bars are held, and what cannot be measured is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.scheduler import tree


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "NUM_NODES", 600)
    monkeypatch.setattr(tree, "LENGTH", 64)
    monkeypatch.setattr(tree, "NUM_PROMPTS", 4)
    monkeypatch.setattr(tree, "REPEATS", {name: {"python": 3, "rust_hotpath": 3} for name in tree.REFERENCE})


@pytest.mark.usefixtures("small")
def test_the_reference_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tree.main(["--backend", "python", "--gate", "--out", str(tmp_path / "found.json")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["python"]) == list(tree.REFERENCE) and min(result["python"].values()) > 0
    assert json.loads((tmp_path / "found.json").read_text())["us"]["python"]["evict_one"]["p99"] > 0


@pytest.mark.usefixtures("small")
def test_a_missed_bar_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "times", lambda backend, name, repeats: [tree.BARS[name] + 0.1] * repeats)
    assert tree.main(["--backend", "rust_hotpath"]) == 0
    assert tree.main(["--backend", "rust_hotpath", "--gate"]) == 1


def test_a_build_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tree, "CARGO", ("git", "no-such-subcommand"))
    assert tree.main(["--backend", "rust_hotpath"]) == 2
    assert "no-such-subcommand" in capsys.readouterr().err
