"""`kernels.pages` in Triton. Imported only with Triton installed; its interpreter runs the same source on the CPU.

Invariants: sizes that change from step to step are plain arguments, never compiled in, nor is where a step's lists lie
in its block: a step never waits for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize_on_alignment=["updates", "page_ids"])  # type: ignore[untyped-decorator, unused-ignore]
def _apply(table, updates, page_ids, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    update = updates + tl.program_id(0) * 4
    slot = tl.load(update).to(tl.int64)
    first, count, start = tl.load(update + 1), tl.load(update + 2), tl.load(update + 3)
    row = table + slot * columns + first
    for at in range(0, count, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        mask = offsets < count
        tl.store(row + offsets, tl.load(page_ids + start + offsets, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots", "indptr", "out"])  # type: ignore[untyped-decorator, unused-ignore]
def _gather(table, slots, indptr, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    start = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - start
    pages = table + tl.load(slots + row).to(tl.int64) * columns
    for at in range(0, count, BLOCK):
        offsets = at + tl.arange(0, BLOCK)
        mask = offsets < count
        tl.store(out + start + offsets, tl.load(pages + offsets, mask=mask), mask=mask)


def apply_updates(page_table: Tensor, updates: Tensor, page_ids: Tensor) -> None:
    _apply[(len(updates),)](page_table, updates, page_ids, page_table.shape[1], BLOCK=_BLOCK)


def gather_pages(page_table: Tensor, slots: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
    _gather[(len(slots),)](page_table, slots, kv_indptr, out, page_table.shape[1], BLOCK=_BLOCK)
