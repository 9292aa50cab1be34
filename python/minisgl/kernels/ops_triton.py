"""The operations of `kernels.ops` in Triton. Imported only if Triton is installed; its interpreter runs the same source
on the CPU.

Invariants: sizes that change from step to step are plain arguments, never compiled in, nor are the offsets of a step's
lists in its buffer: a step never waits for the compiler. A selected expert is always a valid index, even with NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["out_loc"])  # type: ignore[untyped-decorator, unused-ignore]
def _store(pool_k, pool_v, out_loc, k, v, width, k_stride, v_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    offset = tl.load(out_loc + token).to(tl.int64) * width
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    tl.store(pool_k + offset + offsets, tl.load(k + token * k_stride + offsets, mask=mask), mask=mask)
    tl.store(pool_v + offset + offsets, tl.load(v + token * v_stride + offsets, mask=mask), mask=mask)


def _rows(x: Tensor) -> Tensor:
    """Return x with the values of each token contiguous, as the heads of a fused projection are already."""
    dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if dense else x.contiguous()


def store_kv(pool_k: Tensor, pool_v: Tensor, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
    k, v = _rows(k), _rows(v)
    width = k.shape[1] * k.shape[2]
    block = triton.next_power_of_2(width)
    _store[(len(k),)](pool_k, pool_v, out_loc, k, v, width, k.stride(0), v.stride(0), BLOCK=block)


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


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _route(  # type: ignore[no-untyped-def]
    logits, chosen, shares, num_experts, per_token, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr, PICKED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    left = tl.load(logits + token * num_experts + expert, mask=expert < num_experts, other=float("-inf")).to(tl.float32)
    most = tl.max(left, 0)
    total = tl.sum(tl.exp(left - most), 0)
    pick = tl.arange(0, PICKED)
    selected = tl.zeros((PICKED,), tl.int32)
    share = tl.zeros((PICKED,), tl.float32)
    for i in range(per_token):
        best = tl.max(left, 0)
        at = tl.minimum(tl.min(tl.where(left == best, expert, EXPERTS), 0), num_experts - 1)
        selected = tl.where(pick == i, at, selected)
        share = tl.where(pick == i, tl.exp(best - most), share)
        left = tl.where(expert == at, float("-inf"), left)
    if NORMALISE:
        total = tl.sum(share, 0)
    offset = token * per_token + pick
    tl.store(chosen + offset, selected, mask=pick < per_token)
    tl.store(shares + offset, (share / total).to(shares.dtype.element_ty), mask=pick < per_token)


def route(logits: Tensor, per_token: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Compute `kernels.ops.route` for a contiguous tensor. The selected experts are int32."""
    num_tokens, num_experts = logits.shape
    chosen = torch.empty(num_tokens, per_token, dtype=torch.int32, device=logits.device)
    shares = logits.new_empty(num_tokens, per_token)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            chosen,
            shares,
            num_experts,
            per_token,
            NORMALISE=normalise,
            EXPERTS=triton.next_power_of_2(num_experts),
            PICKED=triton.next_power_of_2(per_token),
            num_warps=1,
        )
    return chosen, shares


_MASK_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])  # type: ignore[untyped-decorator, unused-ignore]
def _mask(logits, rows, bits, vocab, stride, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    word = tl.load(bits + at * words + ids // 32, mask=inside, other=-1)
    banned = inside & (((word >> (ids % 32)) & 1) == 0)
    tl.store(logits + row * stride + ids, float("-inf"), mask=banned)


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    vocab = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab, _MASK_BLOCK))
    _mask[grid](logits, rows, bits, vocab, logits.stride(0), bits.shape[1], BLOCK=_MASK_BLOCK)
