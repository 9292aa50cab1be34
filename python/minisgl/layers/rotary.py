"""Rotary position embeddings on tensors, in the half-split layout of Llama checkpoints. `models/rope.py` has the
frequencies.

Invariants: the tables hold every position that the context allows; they are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Rotary:
    """`at` picks a batch's part of the tables once per forward; layers apply it."""

    def __init__(
        self, frequencies: Tensor, max_position: int, scale: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`frequencies`: [head_dim / 2] float32 radians per position; `scale`: cos and sin are multiplied by it."""
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # the sign of the rotated half lies in the table, so that rotation is one roll
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def at(self, positions: Tensor) -> Rotation:
        """[n] int64"""
        return Rotation(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of n tokens: cosines and signed sines, [n, 1, head_dim]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[n, heads, head_dim] -> the same shape."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)
