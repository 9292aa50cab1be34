"""Routed experts (`kernels.experts`) in Triton: assignment of tokens to experts, two grouped products, the sum.

A *use* is one (token, expert) pair, with index token * k + i. The uses of an expert are in blocks of `block_m`; a
product's program multiplies one block's rows by one tile of its expert's weights. Products read rows by use and write
each use to its own row, so nothing is ever sorted in memory. With very few uses each is a block with one row.

Invariants: nothing depends on a value that only the device knows: grids are upper bounds, surplus blocks return at
once; no atomics: the same inputs give the same bits, and a row's sums run in the same order whatever else is in the
batch, as long as the tile is the same; products and the sum over uses accumulate in float32; sizes that change from
step to step are plain arguments, never compiled in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.experts_tiles import Tile, max_blocks

_CHUNK = 1024  # uses that are checked together
_COMBINE = 1024


@triton.jit(do_not_specialize=["num_uses"])  # type: ignore[untyped-decorator, unused-ignore]
def _count(chosen, counts, num_uses, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the uses of one expert."""
    expert = tl.program_id(0)
    counted = tl.zeros((CHUNK,), tl.int32)
    for at in range(0, num_uses, CHUNK):
        use = at + tl.arange(0, CHUNK)
        counted += (tl.load(chosen + use, mask=use < num_uses, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(counted, 0))


@triton.jit(do_not_specialize=["num_uses", "num_blocks"])  # type: ignore[untyped-decorator, unused-ignore]
def _place(  # type: ignore[no-untyped-def]
    chosen,
    counts,
    uses,
    experts,
    num_uses,
    num_blocks,
    num_experts,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fill an expert's blocks with its uses in order, padded with `num_uses`; the last expert marks unused blocks."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    count_of = tl.load(counts + other, mask=other < num_experts, other=0)
    blocks_of = (count_of + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(other < expert, blocks_of, 0), 0)
    blocks = tl.sum(tl.where(other == expert, blocks_of, 0), 0)
    count = tl.sum(tl.where(other == expert, count_of, 0), 0)
    own_uses = uses + first * BLOCK_M
    if count > 0:
        before = 0
        for at in range(0, num_uses, CHUNK):
            use = at + tl.arange(0, CHUNK)
            hit = tl.load(chosen + use, mask=use < num_uses, other=-1) == expert
            rank = tl.cumsum(hit.to(tl.int32), 0)
            tl.store(own_uses + before + rank - 1, use, mask=hit)
            before += tl.sum(hit.to(tl.int32), 0)
        over = count + tl.arange(0, BLOCK_M)
        tl.store(own_uses + over, tl.zeros((BLOCK_M,), tl.int32) + num_uses, mask=over < blocks * BLOCK_M)
        for at in range(0, blocks, CHUNK):
            block = at + tl.arange(0, CHUNK)
            tl.store(experts + first + block, tl.zeros((CHUNK,), tl.int32) + expert, mask=block < blocks)
    if expert == num_experts - 1:
        for at in range(first + blocks, num_blocks, CHUNK):
            block = at + tl.arange(0, CHUNK)
            tl.store(experts + block, tl.full((CHUNK,), -1, tl.int32), mask=block < num_blocks)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _block_of(uses, experts, block, num_uses, BLOCK_M: tl.constexpr, ALONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a block's expert, and the use in each of its rows, `num_uses` for padding."""
    row = tl.arange(0, BLOCK_M)
    use = tl.where(row == 0, block, num_uses) if ALONE else tl.load(uses + block * BLOCK_M + row)
    return tl.load(experts + block).to(tl.int64), use


@triton.jit(do_not_specialize=["num_uses", "per_token"])  # type: ignore[untyped-decorator, unused-ignore]
def _gate_up(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    uses,
    experts,
    num_uses,
    per_token,
    hidden,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Compute out[use] = silu(gate) * up of x[use // per_token]. Programs for the tiles of one block are adjacent: its
    rows, and the weights of its expert's next block, are then in the cache."""
    tiles = tl.cdiv(inner, BLOCK_N)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, use = _block_of(uses, experts, block, num_uses, BLOCK_M, ALONE)
    if expert < 0:
        return
    valid = use < num_uses
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = column < inner
    k = tl.arange(0, BLOCK_K)
    rows = x + (use // per_token).to(tl.int64)[:, None] * hidden + k[None, :]
    weights = weight + column.to(tl.int64)[None, :] * hidden + k[:, None]
    gate, up = weights + expert * 2 * inner * hidden, weights + (expert * 2 + 1) * inner * hidden
    gated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    upped = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, hidden, BLOCK_K):
        left = k < hidden - at
        a = tl.load(rows + at, mask=valid[:, None] & left[None, :], other=0.0)
        mask = wanted[None, :] & left[:, None]
        gated = tl.dot(a, tl.load(gate + at, mask=mask, other=0.0), gated, input_precision="ieee")
        upped = tl.dot(a, tl.load(up + at, mask=mask, other=0.0), upped, input_precision="ieee")
    result = gated / (1.0 + tl.exp(-gated)) * upped
    place = out + use.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=valid[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["num_uses"])  # type: ignore[untyped-decorator, unused-ignore]
def _down(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    shares,
    uses,
    experts,
    num_uses,
    inner,
    hidden,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Compute out[use] = shares[use] * down(x[use])."""
    tiles = tl.cdiv(hidden, BLOCK_N)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    expert, use = _block_of(uses, experts, block, num_uses, BLOCK_M, ALONE)
    if expert < 0:
        return
    valid = use < num_uses
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = column < hidden
    k = tl.arange(0, BLOCK_K)
    rows = x + use.to(tl.int64)[:, None] * inner + k[None, :]
    columns = weight + expert * hidden * inner + column.to(tl.int64)[None, :] * inner + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, inner, BLOCK_K):
        left = k < inner - at
        a = tl.load(rows + at, mask=valid[:, None] & left[None, :], other=0.0)
        b = tl.load(columns + at, mask=wanted[None, :] & left[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    share = tl.load(shares + use, mask=valid, other=0.0).to(tl.float32)
    place = out + use.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(place, (total * share[:, None]).to(out.dtype.element_ty), mask=valid[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["per_token"])  # type: ignore[untyped-decorator, unused-ignore]
def _combine(x, out, per_token, hidden, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute out[token] = the sum of its uses, in order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(per_token):
        total += tl.load(x + (token * per_token + i) * hidden + column, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=wanted)


def assign_uses(chosen: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Assign the uses of chosen [n, k] to blocks. Returns uses [blocks * block_m] int32 (n * k for padding) and experts
    [blocks] int32, the expert of each block (-1 for an unused one). The number of blocks is `max_blocks`."""
    num_uses = chosen.numel()
    num_blocks = max_blocks(num_uses, num_experts, block_m)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    uses = torch.empty(num_blocks * block_m, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=chosen.device)
    _count[(num_experts,)](chosen, counts, num_uses, CHUNK=_CHUNK)
    _place[(num_experts,)](
        chosen,
        counts,
        uses,
        experts,
        num_uses,
        num_blocks,
        num_experts,
        BLOCK_M=block_m,
        EXPERTS=triton.next_power_of_2(num_experts),
        CHUNK=_CHUNK,
    )
    return uses, experts


def run(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor, tile: Tile) -> Tensor:
    """Compute `kernels.experts.run` for contiguous tensors with at least one token and one value of `inner`."""
    num_experts, hidden, inner = down.shape
    num_tokens, per_token = chosen.shape
    num_uses = chosen.numel()
    uses, experts = (chosen, chosen.view(-1)) if tile.alone else assign_uses(chosen, num_experts, tile.block_m)
    how = {"BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "ALONE": tile.alone}
    how |= {"num_warps": tile.warps, "num_stages": tile.stages}
    between = x.new_empty(num_uses, inner)
    grid = (len(experts) * triton.cdiv(inner, tile.gate_up_n),)
    _gate_up[grid](
        x, gate_up, between, uses, experts, num_uses, per_token, hidden, inner, BLOCK_N=tile.gate_up_n, **how
    )
    each = x.new_empty(num_uses, hidden)
    grid = (len(experts) * triton.cdiv(hidden, tile.down_n),)
    _down[grid](between, down, each, shares, uses, experts, num_uses, inner, hidden, BLOCK_N=tile.down_n, **how)
    out = torch.empty_like(x)
    _combine[(num_tokens, triton.cdiv(hidden, _COMBINE))](each, out, per_token, hidden, BLOCK=_COMBINE)
    return out
