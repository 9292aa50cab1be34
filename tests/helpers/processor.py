"""Features of the processor that runs the tests, and a way to disable some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest


@cache
def cpu_flags() -> frozenset[str]:
    """Return the CPU flags by their Linux names; empty on other systems."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@contextmanager
def without_amx() -> Iterator[None]:
    """Make engines loaded in the `with` use AVX-512 instead of AMX, whose tiles sum a prompt in another order than its
    tokens were decoded (docs/cpu.md), so that recomputed values have other bits."""
    with pytest.MonkeyPatch.context() as patch:
        if "MINISGL_CPU_ISA" not in os.environ and "amx_int8" in cpu_flags():
            patch.setenv("MINISGL_CPU_ISA", "avx512")
        yield
