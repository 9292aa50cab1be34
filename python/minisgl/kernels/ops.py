"""Small operations of a step: storing K and V in the pool, the page table and its list of pages to read, the selection
of experts, the mask of forbidden tokens. Each runs in torch, or in Triton if the tensor is on a CUDA device and Triton
is installed.

Invariants: on a device nothing waits, and sizes are those that the host knows; torch and Triton write the same. Pool
slots of padding rows are written in any order; no other slot is written twice. On a device equal logits go to the
expert of the lower index, whatever else is in the batch (in half precision some are equal, and `torch.topk` promises
nothing about them).
"""

from __future__ import annotations

import functools
import importlib.util
from functools import cache

import torch
from torch import Tensor


@functools.cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton_is_installed()


def store_kv(pool_k: Tensor, pool_v: Tensor, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] at the slots out_loc [n] of the pools, which are [slots,
    kv_heads, k_dim] and [slots, kv_heads, v_dim]."""
    if use_triton(pool_k) and pool_k.shape == pool_v.shape:
        from minisgl.kernels import ops_triton

        ops_triton.store_kv(pool_k, pool_v, out_loc, k, v)
        return
    places = out_loc.long()
    pool_k.index_copy_(0, places, k)
    pool_v.index_copy_(0, places, v)


UPDATE_FIELDS = 4  # req_slot, first column, count, start of its pages


def apply_updates(page_table: Tensor, updates: Tensor, page_ids: Tensor) -> None:
    """Write `page_ids` [p] int32 into `page_table` [slots, columns] int32 according to `updates` [s, 4] int32: slot,
    first column, count, start in `page_ids`. Updates must not overlap: they are written in any order."""
    if not len(updates):
        return
    if use_triton(page_table):
        from minisgl.kernels import ops_triton

        ops_triton.apply_updates(page_table, updates, page_ids)
        return
    slot, column, count, start = updates.long().unbind(1)
    owner = torch.repeat_interleave(count, output_size=len(page_ids))
    at = torch.arange(len(page_ids), device=page_ids.device)
    page_table[slot[owner], column[owner] + at - start[owner]] = page_ids


def gather_pages(page_table: Tensor, slots: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
    """Gather the pages of each row: those of row r go to out[kv_indptr[r] : kv_indptr[r + 1]]. `slots` [r] and
    `kv_indptr` [r + 1] int32; `out` [kv_indptr[-1]] int32."""
    if not len(slots):
        return
    if use_triton(page_table):
        from minisgl.kernels import ops_triton

        ops_triton.gather_pages(page_table, slots, kv_indptr, out)
        return
    starts = kv_indptr[:-1].long()
    row = torch.repeat_interleave(kv_indptr.diff().long(), output_size=len(out))
    column = torch.arange(len(out), device=out.device) - starts[row]
    out.copy_(page_table[slots.long()[row], column])


def serves(logits: Tensor) -> bool:
    """Return whether the Triton form runs. A compiler of whole models fuses the torch form by itself."""
    return use_triton(logits) and not torch.compiler.is_compiling()


def route(logits: Tensor, per_token: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the `per_token` largest of logits [n, experts]: experts, [n, per_token] integers, and probabilities [n,
    per_token] in the dtype of `logits`, from a softmax over all in float32. `normalise`: scaled to sum to 1."""
    if serves(logits):
        from minisgl.kernels import ops_triton

        return ops_triton.route(logits.contiguous(), per_token, normalise)
    shares, chosen = logits.float().softmax(-1).topk(per_token, -1)
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares.to(logits.dtype)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set forbidden logits to -inf, in place. logits [n, vocab] float32; rows [m] int32, each at most once; bits [m,
    ceil(vocab / 32)] int32, where bit i % 32 of word i // 32 is set if id i is allowed."""
    if use_triton(logits):
        from minisgl.kernels import ops_triton

        ops_triton.mask_tokens(logits, rows, bits)
        return
    # adds a table of eight values per byte: several times as fast as unpacking the bits and filling
    index = bits.view(torch.uint8).flatten().int()
    added = _of_byte(logits.device).index_select(0, index).view(len(rows), -1)
    logits.index_add_(0, rows, added[:, : logits.shape[1]])


@cache
def _of_byte(device: torch.device) -> Tensor:
    may_come = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(may_come.bool(), 0.0, float("-inf")).to(device)
