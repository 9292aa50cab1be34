"""The page table on its device: a step's updates of it, and the list of pages that the step's rows read.

Invariants: both run on the device alone, at sizes that the host knows, so nothing waits; torch and Triton write the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.triton_available import use_triton

UPDATE_FIELDS = 4  # req_slot, first column, count, where its pages start


def apply_updates(page_table: Tensor, updates: Tensor, page_ids: Tensor) -> None:
    """Write `page_ids` [p] int32 into `page_table` [slots, columns] int32 along `updates` [s, 4] int32: slot, first
    column, count, start in `page_ids`. No two updates touch the same place: they are written in any order."""
    if not len(updates):
        return
    if use_triton(page_table):
        from minisgl.kernels import pages_triton

        pages_triton.apply_updates(page_table, updates, page_ids)
        return
    slot, column, count, start = updates.long().unbind(1)
    owner = torch.repeat_interleave(count, output_size=len(page_ids))
    at = torch.arange(len(page_ids), device=page_ids.device)
    page_table[slot[owner], column[owner] + at - start[owner]] = page_ids


def gather_pages(page_table: Tensor, slots: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
    """The pages of each row one after the other: row r's lie in out[kv_indptr[r] : kv_indptr[r + 1]]. `slots` [r] and
    `kv_indptr` [r + 1] int32; `out` [kv_indptr[-1]] int32."""
    if not len(slots):
        return
    if use_triton(page_table):
        from minisgl.kernels import pages_triton

        pages_triton.gather_pages(page_table, slots, kv_indptr, out)
        return
    starts = kv_indptr[:-1].long()
    row = torch.repeat_interleave(kv_indptr.diff().long(), output_size=len(out))
    column = torch.arange(len(out), device=out.device) - starts[row]
    out.copy_(page_table[slots.long()[row], column])
