"""Products of halves with float32 sums: what output heads compute.

On a CPU torch multiplies no halves into float32. The CPU engine's kernels do, from a copy of the table in their own
layout; where those are missing (no extension, no vectors) pieces of the table become float32, one after the other.

Invariants: a product is that of the numbers as they are; on a CPU by the kernels it has the same bits for every number
of rows, which are others for rows of bfloat16 than for the same numbers in float32.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import envs
from minisgl.config import ConfigError

_WIDE_BYTES = 4 * 2**20  # of the table that are float32 at once: they are still in a cache when they are multiplied


class WideProduct:
    """x [n, in] -> [n, out] float32, by a table [out, in] of halves on a CPU that changes no more, and of which nothing
    is needed afterwards."""

    def __init__(self, table: Tensor) -> None:
        from minisgl import _rust

        self._outputs = table.shape[0]
        self._head = _rust.CpuHead(
            table.contiguous().view(torch.uint8).numpy(),
            str(table.dtype).removeprefix("torch."),
            (table.shape[0], table.shape[1]),
            envs.cpu_isa(),
            torch.get_num_threads(),
            _gomp_parallel(),
        )

    @staticmethod
    def serves(table: Tensor) -> bool:
        """Whether the kernels multiply such a table, and faster than torch. Raises `ConfigError`."""
        if table.device.type != "cpu" or table.dtype not in (torch.bfloat16, torch.float16):
            return False
        try:
            from minisgl import _rust
        except ImportError:
            return False
        try:
            return _rust.CpuHead.isa(envs.cpu_isa()) != "scalar"
        except ValueError as error:
            raise ConfigError(str(error.args[-1])) from error

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self._head.width)
        if len(x):
            self._head.product(x.float().contiguous().numpy(), out.numpy(), x.dtype is torch.bfloat16)
        return out if out.shape[1] == self._outputs else out[:, : self._outputs].contiguous()


def _gomp_parallel() -> int:
    """Where the function is by which torch calls its threads, if they are GNU's OpenMP; else 0. They spin between two
    operations of torch: other threads would have to share cores with them."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] of the dtype of `weight` [out, in], or of another if that is float32 -> [n, out] float32."""
    if weight.dtype is torch.float32:
        return F.linear(x.float(), weight)
    if weight.device.type == "cuda" and "dtype" in torch.ops.aten.mm.overloads():  # since torch 2.8
        product: Tensor = torch.ops.aten.mm.dtype(x, weight.t(), torch.float32)
        return product
    x = x.float()
    at_once = max(1, _WIDE_BYTES // (4 * weight.shape[1]))
    wide, out = x.new_empty(at_once, weight.shape[1]), x.new_empty(len(x), len(weight))
    for at in range(0, len(weight), at_once):
        part = weight[at : at + at_once]
        torch.mm(x, wide[: len(part)].copy_(part).t(), out=out[:, at : at + len(part)])
    return out
