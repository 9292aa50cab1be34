"""Matrix products on the CPU through oneDNN: weights in its own layout, and few distinct numbers of rows. The product
is the same as `torch.nn.functional.linear`.

Layout: a matmul of few rows then needs no reordering of the weight per call. Measured on two AVX-512 bf16 cores with a
[4096, 1024] weight: 0.80 against 0.59 ms at 8 rows, 1.87 against 1.60 at 32, 0.34 against 0.38 at one row; weights
under 4 MiB gain nothing.

Rows: oneDNN compiles a kernel for each number of rows of each weight's shape and keeps the last 1024 of them. Measured
on a model with four shapes: 85 ms and 3 MB for each number of rows that comes for the first time, 1.6 GB before it
levels off. So rows are padded to `padded_rows`, of which there are few (0.2 GB). float32 goes through another library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_BYTES = 4 * 2**20
_ROWS = 32  # the layout is chosen for this many rows
_STEPS = 8  # from one power of two to the next


def padded_rows(rows: int) -> int:
    """`rows`, rounded up to one of few numbers: all up to 16, then eight to each power of two."""
    step = 1 << max(0, (rows - 1).bit_length() - _STEPS.bit_length())
    return -(-rows // step) * step


def pack(weight: Tensor) -> Tensor | None:
    """The packed copy of a [out, in] weight, for `linear` only; None if plain is as good or nothing else exists."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or weight.nbytes < MIN_BYTES:
        return None
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x [n, in] -> [n, out]. `packed` takes the place of `weight`, which then may be empty."""
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype is not torch.float32 and (padding := padded_rows(rows) - rows):
        x = F.pad(x, (0, 0, 0, padding))
    if packed is None:
        return F.linear(x, weight, bias)[:rows]
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product[:rows]


def add_linear(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y [n, out] becomes y + x W^T, in one operation where the number of rows needs no padding."""
    rows = x.shape[0]
    if x.device.type == "cpu" and x.dtype is not torch.float32 and padded_rows(rows) > rows:
        y += linear(x, weight)
    else:
        y.addmm_(x, weight.t())
