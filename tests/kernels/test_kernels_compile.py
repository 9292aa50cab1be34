"""Every Triton kernel compiles for Hopper: the tests of `compile_kernels.py`, in a process of their own.

Triton's extension says at the end of a process what of it was not freed; the tests' own end has other things to say.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_all() -> None:
    command = [sys.executable, "-m", "pytest", str(FILE), "--tb=short", "-rs", "-m", "wide or not wide"]
    done = subprocess.run(command, cwd=FILE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
