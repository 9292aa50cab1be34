"""`kernels.routing` in Triton: one launch, one program for each token.

Invariants: a choice is always an expert's number, even among NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    found = tl.zeros((PICKED,), tl.int32)
    share = tl.zeros((PICKED,), tl.float32)
    for i in range(per_token):
        best = tl.max(left, 0)
        at = tl.minimum(tl.min(tl.where(left == best, expert, EXPERTS), 0), num_experts - 1)
        found = tl.where(pick == i, at, found)
        share = tl.where(pick == i, tl.exp(best - most), share)
        left = tl.where(expert == at, float("-inf"), left)
    if NORMALISE:
        total = tl.sum(share, 0)
    place = token * per_token + pick
    tl.store(chosen + place, found, mask=pick < per_token)
    tl.store(shares + place, (share / total).to(shares.dtype.element_ty), mask=pick < per_token)


def route(logits: Tensor, per_token: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """As `kernels.routing.route`, of a contiguous tensor. The choice is int32."""
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
