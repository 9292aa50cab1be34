"""The engines that compute models here, for tests that drive each of them."""

from __future__ import annotations

import pytest

from minisgl import _rust

HAS_CPU = hasattr(_rust, "CpuEngine")
NEEDS_CPU = pytest.mark.skipif(not HAS_CPU, reason="the extension has no CPU engine")
CPU = pytest.param("cpu", marks=NEEDS_CPU)
MODEL_ENGINES = ("torch", CPU)
"""For `parametrize`."""
