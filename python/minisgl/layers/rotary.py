"""Rotary position embeddings on tensors, in the half-split layout of Llama checkpoints. `minisgl.rope` has the
frequencies.

Keeps true: the tables hold every position that the context allows; they are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.rope import RopeConfig, inverse_frequencies


class Rotary:
    """`at` picks the tables of a batch once per forward; `rotate` applies them in every layer."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_position: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._half = head_dim // 2
        frequencies = torch.from_numpy(inverse_frequencies(rope, head_dim, max_position))
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        # the sign of the rotated half lies in the table, so that rotation is one roll
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n] int64 -> two [n, 1, head_dim]"""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """[n, heads, head_dim] -> the same shape."""
        cos, sin = tables
        return torch.addcmul(x * cos, x.roll(self._half, -1), sin)
