"""The benchmark of layers with a state, on a tiny one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark import states
from minisgl.bench import random_models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "lfm2-1.2b"])
def test_what_saving_takes_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    small = replace(random_models.SHAPES[name], hidden=256, heads=4, kv_heads=2, head_dim=64, inner=256, vocab=49_408)
    small = replace(small, attending=(1,), state_heads=2)
    monkeypatch.setitem(random_models.SHAPES, name, small)
    options = ["--layers", "2", "--rounds", "2", "--scale", "16", "--threads", "1", "--out", str(tmp_path / "run")]
    assert states.main([name, *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["saving"]
    assert set(found) == set(states.SAVING)
    assert all(len(rounds) == 2 and set(rounds[0]) == {"prompt", "decode"} for rounds in found.values())
    report = (tmp_path / "run" / "README.md").read_text()
    assert "| saved each 64 |" in report and str(tmp_path) not in report
