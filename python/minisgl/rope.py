"""Rotary position embeddings (Su et al. 2021): how fast each pair of a head's dimensions turns, and the ways to stretch
that over longer contexts.

Invariants: one rule for every engine, in float32, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`factor` and the rest are used by the `rope_type`s linear, dynamic, llama3 and yarn only."""

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


def inverse_frequencies(rope: RopeConfig, head_dim: int, context_len: int) -> Floats:
    """[head_dim / 2] float32 radians per position, scaled as `rope.rope_type` says, for texts of up to `context_len`
    tokens."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    theta = rope.theta * (_dynamic(rope, head_dim, context_len) if rope.rope_type == "dynamic" else 1.0)
    # the power in float64, rounded: float32 powers differ from library to library
    powers = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    frequencies: Floats = np.float32(1.0) / powers
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _dynamic(rope: RopeConfig, head_dim: int, context_len: int) -> float:
    """By how much the base grows (dynamic NTK, as transformers has it). There it grows with the longest text seen so
    far, which would turn all other texts, and the keys that are kept of them, into others: here one length counts for
    all texts, that of the context which is served."""
    longer = max(context_len, rope.original_max_position) / rope.original_max_position
    return float((rope.factor * longer - (rope.factor - 1)) ** (head_dim / (head_dim - 2)))


def _llama3(frequencies: Floats, rope: RopeConfig) -> Floats:
    """Long waves are slowed by `factor`, short ones stay, those between are blended (Llama 3.1)."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    slowed = frequencies / np.float32(rope.factor)
    blend = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    mixed = (1 - blend) * slowed + blend * frequencies
    long, short = wavelengths > np.float32(original / low), wavelengths < np.float32(original / high)
    return np.where(long, slowed, np.where(short, frequencies, mixed)).astype(np.float32)


def _yarn(frequencies: Floats, rope: RopeConfig, head_dim: int) -> Floats:
    """Peng et al. 2023: a dimension is slowed by `factor`, kept, or between the two, by how often it turns over the
    original context: a ramp from the dimension that does so `beta_fast` times to the one of `beta_slow` times."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # a step is a steep ramp
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)
    slowed = ramp.clip(0, 1)
    found: Floats = frequencies / np.float32(rope.factor) * slowed + frequencies * (1 - slowed)
    return found
