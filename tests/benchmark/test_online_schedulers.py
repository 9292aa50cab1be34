"""Scheduler by scheduler: the report says what the runs say, and can be written again from the raw data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.ab.point import point_from
from benchmark.online import profiles
from benchmark.online.front_ends import COMPARISON as FRONT_ENDS
from benchmark.online.profiles import Profile
from benchmark.online.schedulers import COMPARISON

PROFILES = COMPARISON.profiles


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
    monkeypatch.setattr(profiles, "compare", pretended)
    names = list(PROFILES)[:2]
    assert COMPARISON.main(["--out", str(tmp_path), "--pairs", "3", "--profile", *names]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["profiles"]
    assert found[names[0]]["output_tok_s"]["estimate"] == pytest.approx(0.2)
    report = (tmp_path / "README.md").read_text()
    assert "| +20 % [+20, +20] |" in report and "-50 %" in report
    (tmp_path / "README.md").unlink()
    assert COMPARISON.main(["--out", str(tmp_path), "--again"]) == 0
    assert (tmp_path / "README.md").read_text() == report


@pytest.mark.parametrize("profile", [*PROFILES.values(), *FRONT_ENDS.profiles.values()], ids=lambda one: one.load)
def test_loads_fit_their_servers(profile: Profile) -> None:
    if profile.measure is not None:
        return  # it has no load
    rows = int(profile.flags[profile.flags.index("--max-running-requests") + 1])
    settings = point_from(profile.load.split()).settings
    assert max(settings.concurrency, default=0) <= rows
