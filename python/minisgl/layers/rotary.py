"""Rotary position embeddings (Su et al. 2021), in the half-split layout of Llama checkpoints, with the ways to stretch
them over longer contexts.

Keeps true: the tables hold every position that the context allows; they are computed in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`factor` and the rest are used by the `rope_type`s linear, llama3 and yarn only."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0  # yarn: what turns more often over the original context keeps its speed
    beta_slow: float = 1.0  # and what turns less often is slowed by the whole factor
    attention_factor: float = 1.0  # cos and sin are multiplied by it, so scores by its square
    truncate: bool = True  # the border dimensions between the two are rounded outwards


def attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN makes of a `factor` where nothing else is said: longer contexts want sharper attention."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32 radians per position, scaled as `rope.rope_type` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, head_dim)
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


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Peng et al. 2023: a dimension is slowed by `factor`, kept, or between the two, by how often it turns over the
    original context: a ramp from the dimension that does so `beta_fast` times to the one of `beta_slow` times."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # a step is a steep ramp
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


class Rotary:
    """`at` picks the tables of a batch once per forward; `rotate` applies them in every layer."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_position: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._half = head_dim // 2
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(rope, head_dim))
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
