"""Matrix products of layers and output heads on the CPU.

Layers go through oneDNN, with weights in its own layout and few distinct row counts; the product equals
`torch.nn.functional.linear`. A matmul of few rows then needs no reordering of the weight per call. Measured on two
AVX-512 bf16 cores with a [4096, 1024] weight: 0.80 against 0.59 ms at 8 rows, 1.87 against 1.60 at 32, 0.34 against
0.38 at one row; weights under 4 MiB gain nothing. oneDNN compiles a kernel for each row count of each weight's shape
and keeps the last 1024 of them. Measured on a model with four shapes: 85 ms and 3 MB for each new row count, 1.6 GB
before it levels off. So rows are padded to `padded_rows`, of which there are few (0.2 GB). float32 goes through another
library.

Output heads need products of bf16 or float16 values with float32 sums, which torch lacks on a CPU. The CPU engine's
kernels have them, on a copy of the table in their own layout; without those (no extension, no vector instructions)
slices of the table are converted to float32, one after the other.

Invariants: a product of an output head uses the unconverted values; the kernels give the same bits for every row count,
which differ between bfloat16 rows and float32 rows of the same values.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.extension import _rust, why_missing

MIN_BYTES = 4 * 2**20
_ROWS = 32  # the packed layout is chosen for this many rows
_STEPS = 8  # per power of two


def padded_rows(rows: int) -> int:
    """Return `rows` rounded up to one of a few counts: all up to 16, then eight for each power of two."""
    step = 1 << max(0, (rows - 1).bit_length() - _STEPS.bit_length())
    return -(-rows // step) * step


def pack(weight: Tensor) -> Tensor | None:
    """Return a packed copy of a [out, in] weight, for `linear` only; None if that does not help or is not available."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or weight.nbytes < MIN_BYTES:
        return None
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """Compute x W^T + bias, [n, in] -> [n, out]. `packed` replaces `weight`, which then may be empty."""
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype is not torch.float32 and (padding := padded_rows(rows) - rows):
        x = F.pad(x, (0, 0, 0, padding))
    if packed is None:
        return F.linear(x, weight, bias)[:rows]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product[:rows]


def add_linear(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x W^T to y [n, out] in place, in one operation if the row count needs no padding."""
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype is not torch.float32 and padded_rows(rows) > rows:
        y += linear(x, weight)
    else:
        y.addmm_(x, weight.t())


# of the table that are converted to float32 at once: they are still in a cache when they are multiplied
_WIDE_BYTES = 4 * 2**20


class WideProduct:
    """A product x [n, in] -> [n, out] float32 with a copy of a constant bf16 or float16 table [out, in] on a CPU."""

    def __init__(self, table: Tensor) -> None:
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
        """Return whether the kernels support the table and are faster than torch. Raises `ConfigError`."""
        if table.device.type != "cpu" or table.dtype not in (torch.bfloat16, torch.float16):
            return False
        if why_missing():
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
    """Return the address of the function by which torch starts its threads if they are GNU OpenMP's, else 0. Those
    threads spin between two torch operations: other threads would have to share cores with them."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x [n, in] -> [n, out] float32. x has the dtype of `weight` [out, in]; any dtype if that is float32."""
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
