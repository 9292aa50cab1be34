"""Scheduler by scheduler: the report says what the runs say, and can be written again from the raw data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.ab.point import point_from
from benchmark.online import schedulers
from benchmark.online.schedulers import PROFILES


def pretended(variants: Any, shared: Any, pairs: int, measure: Any) -> dict[str, list[dict[str, float]]]:
    """Half the time per step, and a fifth more tokens."""
    return {
        "python": [{"output_tok_s": 1000.0 + i, "scheduler_us_per_step": 400.0, "start_s": 2.0} for i in range(pairs)],
        "rust_hotpath": [
            {"output_tok_s": 1.2 * (1000.0 + i), "scheduler_us_per_step": 200.0 + i, "start_s": 2.0}
            for i in range(pairs)
        ],
    }


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(schedulers, "compare", pretended)
    profiles = list(PROFILES)[:2]
    assert schedulers.main(["--out", str(tmp_path), "--pairs", "3", "--profile", *profiles]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["profiles"]
    assert found[profiles[0]]["output_tok_s"]["estimate"] == pytest.approx(0.2)
    report = (tmp_path / "README.md").read_text()
    assert "| +20 % [+20, +20] |" in report and "-50 %" in report
    (tmp_path / "README.md").unlink()
    assert schedulers.main(["--out", str(tmp_path), "--again"]) == 0
    assert (tmp_path / "README.md").read_text() == report


@pytest.mark.parametrize("name", list(PROFILES))
def test_loads_fit_their_servers(name: str) -> None:
    profile = PROFILES[name]
    rows = int(profile.flags[profile.flags.index("--max-running-requests") + 1])
    settings = point_from(profile.load.split()).settings
    assert max(settings.concurrency, default=0) <= rows
