"""The tests under tests/gpu, rehearsed on the CPU: so that they run when a GPU is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LATE = ("test_gpu_graphs.py", "test_gpu_scheduling.py", "test_gpu_failures.py")
"""In which steps overlap: what is late makes no difference to the others."""


def rehearsal(how: str, *tests: str) -> str:
    arguments = [sys.executable, "-m", "pytest", "-rsfE", "--tb=short", *(f"tests/gpu/{test}" for test in tests)]
    environment = {**os.environ, "MINISGL_GPU_REHEARSAL": how, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["1", "late"])
def test_all(how: str) -> None:
    said = rehearsal(how, *([""] if how == "1" else LATE))
    assert "passed" not in said, "a rehearsal counts as seen on a GPU"
    assert "rehearsed on cpu" in said
