"""Rooflines fitted to measured steps: from steps that a roofline made, its numbers come back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmark.gpu.calibrate import compare, fit
from minisgl.engine.sim.profile import Roofline, StepLoad, load_profile

ROOT = Path(__file__).resolve().parents[2]


def roofline() -> Roofline:
    found = load_profile("qwen3-8b-h200").roofline
    assert found is not None
    return found


def loads() -> list[StepLoad]:
    """Decode steps whose KV grows, then prompts of 8,192 tokens."""
    decode = [StepLoad(256, 256, 256, kv, kv) for kv in range(50_000, 250_000, 1000)]
    return decode + [StepLoad(8, 8192, 8, 8192, 8192 * n) for n in range(400, 600, 10)]


def test_numbers_come_back() -> None:
    true = msgspec.structs.replace(
        roofline(), bandwidth=3.9e12, flops=6.1e14, overhead_us=100.0, layer_overhead_us=15.0
    )
    rng = np.random.default_rng(0)
    seconds = [true.seconds(load) * float(rng.normal(1, 0.002)) for load in loads()]
    found = fit(roofline(), loads(), seconds)
    assert found["bandwidth"] == pytest.approx(3.9e12, rel=0.02)
    assert found["overhead_us"] == pytest.approx(100 + 36 * 15, rel=0.1)
    assert found["flops"] == pytest.approx(6.1e14, rel=0.02)


def test_a_profile_beside_itself() -> None:
    seconds = [roofline().seconds(load) for load in loads()]
    found = compare(roofline(), loads(), seconds)
    assert found["decode"] == {"steps": 200, "median": 1.0, "p5": 1.0, "p95": 1.0}
    slow = compare(roofline(), loads(), [2 * one for one in seconds])
    assert slow["with prompts"]["median"] == pytest.approx(0.5)


def test_without_such_steps_nothing_is_fitted() -> None:
    assert fit(roofline(), [StepLoad(1, 1, 1, 5, 5)], [0.01]) == {}


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    points = [[*load, 1e3 * roofline().seconds(load)] for load in loads()]
    file.write_text(json.dumps({"steps": {"qwen3-8b": points, "mine": points[:3]}}))
    command = [sys.executable, "benchmark/gpu/calibrate.py", str(file)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "mine: no profile mine-h200" in said
    assert json.loads(said.splitlines()[-1])["qwen3-8b"]["against"]["decode"]["median"] == pytest.approx(1.0)
