"""The text benchmark does the same work on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.text import __main__ as text
from tests.helpers.text import data_folder


def test_a_round(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data_folder("qwen3")
    monkeypatch.setattr(text, "LONG_CHARS", 4000)
    monkeypatch.setattr(text, "NUM_MESSAGES", 8)
    assert text.main(["--rounds", "1", "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "text"
    assert {"qwen3: encode, its next turn", "mistral-v3: decode, token by token"} <= result["ratios"].keys()
    assert "gateway / Python" in (tmp_path / "README.md").read_text(encoding="utf-8")
