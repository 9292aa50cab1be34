"""Rotary position embeddings (RoPE) on tensors, in the half-split layout of Llama checkpoints. `models/rope.py` has the
frequencies.

Invariants: the tables hold every position of the context; they are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Rotary:
    """A RoPE table. `at` selects a batch's part of it once per forward; layers apply that."""

    def __init__(
        self, frequencies: Tensor, max_position: int, scale: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Compute the table of [head_dim / 2] float32 radians per position; `scale`: factor of cos and sin."""
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # the table includes the sign of the rotated half, so that a rotation is one roll
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def at(self, positions: Tensor) -> Rotation:
        """Return the rotation of tokens at `positions` [n] int64."""
        return Rotation(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))

    def at_axes(self, axes: Tensor, of_pairs: Sequence[int]) -> Rotation:
        """Return the rotation of tokens with three positions each, [3, n] int64; `of_pairs`: the axis by pair of
        dimensions."""
        columns = torch.arange(self._cos.shape[1], device=axes.device)
        rows = axes[torch.tensor([*of_pairs, *of_pairs], device=axes.device)].T  # [n, head_dim]
        return Rotation(self._cos[rows, columns].unsqueeze(1), self._sin[rows, columns].unsqueeze(1))


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The rotation of n tokens: cosines and signed sines, [n, 1, head_dim]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [n, heads, head_dim]; returns the same shape."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)
