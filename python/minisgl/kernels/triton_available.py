"""Whether a Triton kernel can take a tensor: if it is on a CUDA device and Triton is installed. Otherwise torch does
the work."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton_is_installed()
