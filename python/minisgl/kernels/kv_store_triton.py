"""`kernels.kv_store` in Triton: K and V in one launch, one program for each token.

Invariants: where `out_loc` lies in a step's block is not compiled in: a step never waits for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["out_loc"])  # type: ignore[untyped-decorator, unused-ignore]
def _store(pool_k, pool_v, out_loc, k, v, width, k_stride, v_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(out_loc + token).to(tl.int64) * width
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    tl.store(pool_k + place + offsets, tl.load(k + token * k_stride + offsets, mask=mask), mask=mask)
    tl.store(pool_v + place + offsets, tl.load(v + token * v_stride + offsets, mask=mask), mask=mask)


def _rows(x: Tensor) -> Tensor:
    """The values of each token side by side, as the heads of a merged projection are already."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()


def store_kv(pool_k: Tensor, pool_v: Tensor, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
    k, v = _rows(k), _rows(v)
    width = k.shape[1] * k.shape[2]
    block = triton.next_power_of_2(width)
    _store[(len(k),)](pool_k, pool_v, out_loc, k, v, width, k.stride(0), v.stride(0), BLOCK=block)
