"""What the processor that runs the tests has, and how to do without a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest


@cache
def cpu_flags() -> frozenset[str]:
    """As Linux names them; none elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@contextmanager
def without_amx() -> Iterator[None]:
    """AMX's tiles add up a prompt in another order than that in which its tokens were decoded (docs/cpu.md), so what is
    computed once more has other bits there. Engines that are loaded in here take AVX-512 instead."""
    with pytest.MonkeyPatch.context() as patch:
        if "MINISGL_CPU_ISA" not in os.environ and "amx_int8" in cpu_flags():
            patch.setenv("MINISGL_CPU_ISA", "avx512")
        yield
