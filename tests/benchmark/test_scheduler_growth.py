"""Growth of a step's time: what is measured is written, and every sweep's cases hold their load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.scheduler import growth
from minisgl.scheduler.backend import BACKENDS, make_control_plane


def test_growth_is_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, sizes in {"batch": (1, 3), "context": (16, 32)}.items():
        monkeypatch.setitem(growth.SWEEPS, name, replace(growth.SWEEPS[name], sizes=sizes))
    monkeypatch.setattr(growth, "REPEATS", {"python": 2, "rust_hotpath": 2})
    monkeypatch.setattr(growth, "ROUNDS", range(1, 3))
    assert growth.main(["batch", "context", "--out", str(tmp_path)]) == 0
    us = json.loads(capsys.readouterr().out.splitlines()[-1])["us"]
    assert {name: list(sizes) for name, sizes in us["context"].items()} == {name: ["16", "32"] for name in BACKENDS}
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["us"]["batch"]["python"]["3"]["median"] == us["batch"]["python"]["3"] > 0
    report = (tmp_path / "README.md").read_text()
    assert "python -m benchmark.scheduler.growth batch context" in report and "| rows |" in report


@pytest.mark.parametrize("name", growth.SWEEPS)
def test_every_sweep_has_cases_that_hold_their_load(name: str) -> None:
    sweep = growth.SWEEPS[name]
    size = sweep.sizes[0]
    repeats = min(3, sweep.max_repeats(size))
    assert len(sweep.make(size)(lambda config: make_control_plane("rust_hotpath", config), repeats)) == repeats


def test_a_sweep_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        growth.main(["depth"])
    assert "depth: must be one of batch" in capsys.readouterr().err
