"""Whether a Triton kernel can take a tensor.

Keeps true: tensors of the CPU never go there; without Triton, torch does the same work.
"""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton_is_installed()
