"""Ids that may not come: their logits become -inf, by packed bits of a row.

Invariants: on a device nothing waits; what may come keeps its logit; torch and Triton write the same.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from minisgl.kernels.triton_available import use_triton


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """logits [n, vocab] float32, changed in place; rows [m] int32, each once; bits [m, ceil(vocab / 32)] int32, of
    which bit i % 32 of word i // 32 says whether id i may come."""
    if use_triton(logits):
        from minisgl.kernels import token_mask_triton

        token_mask_triton.mask_tokens(logits, rows, bits)
        return
    # what a byte adds to eight logits: several times as fast as to unpack the bits and fill by them
    index = bits.view(torch.uint8).flatten().int()
    added = _of_byte(logits.device).index_select(0, index).view(len(rows), -1)
    logits.index_add_(0, rows, added[:, : logits.shape[1]])


@cache
def _of_byte(device: torch.device) -> Tensor:
    may_come = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(may_come.bool(), 0.0, float("-inf")).to(device)
