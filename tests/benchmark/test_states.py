"""The benchmark of layers with a state, on a tiny one: a second turn and a third visitor compute little."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark import states
from minisgl.bench import random_models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "lfm2-1.2b"])
def test_what_is_found_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    small = replace(random_models.SHAPES[name], hidden=256, heads=4, kv_heads=2, head_dim=64, inner=256, vocab=49_408)
    small = replace(small, attending=(1,), state_heads=2)
    monkeypatch.setitem(random_models.SHAPES, name, small)
    options = ["--layers", "2", "--rounds", "2", "--scale", "4", "--threads", "1", "--out", str(tmp_path / "run")]
    assert states.main([name, *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    of = states.sizes(4)
    for one in found["talk"]["minisgl"]:
        cold, second, *visitors = (row["computed"] for row in one.values())
        assert cold == of["talk"] and second < of["answer"] + of["more"] + 16
        assert visitors[0] == of["shared"] + of["own"] and visitors[2] < of["own"] + 16
    assert set(found["saving"]) == set(states.SAVING)
    report = (tmp_path / "run" / "README.md").read_text()
    assert "| saved each 64 |" in report and str(tmp_path) not in report
