"""Rotary position embeddings (Su et al. 2021), in the half-split layout of Llama checkpoints.

Keeps true: the tables hold every position that the context allows; they are computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`factor` and the rest are used by `rope_type` linear and llama3 only."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32 radians per position, scaled as `rope.rope_type` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by `factor`, short ones stay, those between are blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (
        rope.original_max_position / rope.low_freq_factor,
        rope.original_max_position / rope.high_freq_factor,
    )
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * frequencies / rope.factor + blend * frequencies
    slowed = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= longest) & (wavelengths >= shortest), mixed, slowed)


class Rotary:
    """`at` picks the tables of a batch once per forward; `rotate` applies them in every layer."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_position: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._half = head_dim // 2
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        cos, sin = angles.cos(), angles.sin()
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
