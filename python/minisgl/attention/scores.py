"""Attention scores in torch, softmax(scale * q k^T) v: with the fused function if it supports the layer, else step by
step.

Soft caps are those of Gemma 2 (arXiv 2408.00118): a score s becomes softcap * tanh(s / softcap) before the mask.

Invariants: step by step, at most `SCORE_BYTES` of scores exist at once, or those of one query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SCORE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Products:
    """The scale and soft cap of one layer, as in `LayerAttention`. `fused`: torch's fused function may compute it."""

    scale: float | None = None
    softcap: float | None = None
    fused: bool = True

    @property
    def _step_by_step(self) -> bool:
        return self.softcap is not None or not self.fused

    def needs_separate_heads(self, dtype: torch.dtype) -> bool:
        """Return whether K and V should be gathered with separate heads: `attend` would copy interleaved heads of bf16
        or float16, whose products are slower."""
        return self._step_by_step and dtype is not torch.float32

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention of q [rows, kv_heads, n, k_dim] over k [rows, kv_heads, m, k_dim] and v [rows, kv_heads, m,
        v_dim] -> [rows, kv_heads, n, v_dim]. `mask` is added to scores and broadcasts to [rows, kv_heads, n, m]."""
        if not self._step_by_step:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        # float32 row by row or head by head: in one product torch would copy K and V, whose heads are interleaved
        is_wide = q.dtype is torch.float32
        product = _bmm_by_row if is_wide else torch.matmul
        by_head = is_wide and q.shape[0] > q.shape[1]
        if by_head:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            mask = None if mask is None else mask.transpose(0, 1)
        scores = product(q, k.mT)
        self._scale_and_cap(scores, q.shape[3])
        if mask is not None:
            scores += mask
        out = product(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
        return out.transpose(0, 1) if by_head else out

    def extend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute prefill attention of q [1, heads, n, k_dim] over k [1, kv_heads, m, k_dim] and v [1, kv_heads, m,
        v_dim]; returns [1, heads, n, v_dim]. `mask` [n, m]: keys that a query attends to; None: n = m, causal."""
        if not self._step_by_step:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        folded = q.reshape(kv_heads, group, *q.shape[2:])
        out = q.new_empty(kv_heads, group, q.shape[2], v.shape[3])
        block = max(1, SCORE_BYTES // (4 * q.shape[1] * k.shape[2]))
        for start in range(0, q.shape[2], block):
            part = slice(start, start + block)
            scores = folded[:, :, part] @ k[0].unsqueeze(1).mT
            self._scale_and_cap(scores, q.shape[3])
            if mask is not None:
                seen = mask[part]
            else:
                places = torch.arange(k.shape[2], device=q.device)
                seen = places <= places[part, None]
            scores.masked_fill_(~seen, float("-inf"))
            out[:, :, part] = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v[0].unsqueeze(1)
        return out.flatten(0, 1).unsqueeze(0)

    def _scale_and_cap(self, scores: Tensor, k_dim: int) -> None:
        scale = k_dim**-0.5 if self.scale is None else self.scale
        if self.softcap is None:
            scores.mul_(scale)
            return
        scores.mul_(scale / self.softcap).tanh_().mul_(self.softcap)


def _bmm_by_row(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for a [g, h, n, d] and b [g, h, d, m], computed for each g separately."""
    out = a.new_empty(*a.shape[:3], b.shape[3])
    for row, (its_a, its_b) in enumerate(zip(a, b, strict=True)):
        torch.bmm(its_a, its_b, out=out[row])
    return out
