"""Rotary position embeddings (RoPE, Su et al. 2021): the angular frequency of each pair of a head's dimensions, its
scalings for longer contexts, and their config fields in both spellings of transformers: `rope_parameters` (5), and
`rope_scaling` with `rope_theta` (4).

Invariants: one rule for every engine, in float32, without torch. Every field that changes the angles is read or
refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE parameters. `factor` and later fields are those of the scaled `rope_type`s; "default" ignores them."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0  # yarn: dimensions with more rotations over the original context are not scaled
    beta_slow: float = 1.0  # yarn: dimensions with fewer rotations are divided by the whole factor
    attention_factor: float = 1.0  # factor of cos and sin, so scores are multiplied by its square
    truncate: bool = True  # yarn: the two border dimensions are rounded outwards
    short_factors: tuple[float, ...] = ()  # longrope: by dimension, for contexts up to the original one
    long_factors: tuple[float, ...] = ()  # longrope: by dimension, for longer contexts
    turning_share: float = 1.0  # proportional: share of the dimension pairs that rotate, from the first on


def attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """Return YaRN's default attention factor, the scale of cos and sin, for a context `factor` times longer."""
    both = mscale and mscale_all_dim
    return sharpness(factor, mscale) / sharpness(factor, mscale_all_dim) if both else sharpness(factor)


def sharpness(factor: float, by: float = 1.0) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, context_len: int) -> Floats:
    """Return radians per position, [head_dim / 2] float32, scaled as `rope.rope_type` says, for sequences of up to
    `context_len` tokens. `head_dim`: number of rotated values of a head."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    theta = rope.theta * (_dynamic_base_factor(rope, head_dim, context_len) if rope.rope_type == "dynamic" else 1.0)
    # powers are computed in float64 and rounded, because float32 powers differ between libraries
    powers = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    frequencies: Floats = np.float32(1.0) / powers
    if rope.rope_type == "proportional":
        frequencies[int(rope.turning_share * head_dim // 2) :] = 0.0
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(frequencies, rope, head_dim)
    if rope.rope_type == "longrope":
        factors = rope.long_factors if context_len > rope.original_max_position else rope.short_factors
        return np.float32(1.0) / (np.array(factors, np.float32) * powers)
    return frequencies


def _dynamic_base_factor(rope: RopeConfig, head_dim: int, context_len: int) -> float:
    """Return the growth factor of the base (dynamic NTK). transformers grows it with the longest sequence so far, which
    would invalidate cached keys and change other sequences; here the served context length decides for all sequences.
    """
    longer = max(context_len, rope.original_max_position) / rope.original_max_position
    return float((rope.factor * longer - (rope.factor - 1)) ** (head_dim / (head_dim - 2)))


def _llama3_frequencies(frequencies: Floats, rope: RopeConfig) -> Floats:
    """Return Llama 3.1's scaled frequencies: long waves divided by `factor`, short ones kept, others blended."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / frequencies
    slowed = frequencies / np.float32(rope.factor)
    blend = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    mixed = (1 - blend) * slowed + blend * frequencies
    long, short = wavelengths > np.float32(original / low), wavelengths < np.float32(original / high)
    return np.where(long, slowed, np.where(short, frequencies, mixed)).astype(np.float32)


def _yarn_frequencies(frequencies: Floats, rope: RopeConfig, head_dim: int) -> Floats:
    """Return YaRN's scaled frequencies (Peng et al. 2023): by the number of its rotations over the original context a
    dimension is divided by `factor`, kept, or blended, on a ramp from `beta_fast` to `beta_slow` rotations."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # equal borders make a steep ramp
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)
    slowed = ramp.clip(0, 1)
    blended: Floats = frequencies / np.float32(rope.factor) * slowed + frequencies * (1 - slowed)
    return blended


def parse_rope(
    raw: Mapping[str, Any], *, theta: float = 10_000.0, partial: bool = False, query_growth: bool = False
) -> RopeConfig:
    """Parse the RoPE fields of a config. `theta`: the architecture's default base. `partial`, `query_growth`: it
    supports RoPE on a part of heads, queries scaled by position. Raises `ConfigError`, or `KeyError` for no field."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "mrope":  # three positions for images; those of a text token are all equal
        kind = "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope_type: {kind!r} is not supported: only {', '.join(ROPE_TYPES)}")
    share = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    if kind == "proportional" and partial:
        raise ConfigError("config.json: rope_type: 'proportional' is not supported with this architecture")
    if not 0.0 < share <= 1.0 or (share != 1.0 and not partial and kind != "proportional"):
        raise ConfigError(f"config.json: partial_rotary_factor: {share:g}: only 1.0 is supported")
    if scaling.get("llama_4_scaling_beta") and not query_growth:
        raise ConfigError("config.json: llama_4_scaling_beta: queries scaled by their position are not supported")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or theta)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    if kind == "proportional":
        return RopeConfig(theta, kind, float(scaling.get("factor") or 1.0), turning_share=share)
    if kind == "dynamic":
        return _dynamic(raw, scaling, theta)
    if kind == "yarn":
        return _yarn(raw, scaling, theta)
    if kind == "longrope":
        return _longrope(raw, scaling, theta)
    return RopeConfig(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def parse_two_ropes(raw: Mapping[str, Any], theta: float, local_theta: float | None) -> tuple[RopeConfig, RopeConfig]:
    """Parse the RoPE of full-attention layers and of layers with a window. The latter is scaled only if the config has
    parameters by layer type (Gemma 3, OLMo 3); its base is `local_theta`, or with None that of the others."""
    both = raw.get("rope_parameters") or {}
    if "full_attention" in both:
        full, local = (
            {**raw, "rope_parameters": both.get(kind) or {}} for kind in ("full_attention", "sliding_attention")
        )
        return parse_rope(full, theta=theta), parse_rope(local, theta=local_theta or theta)
    rope = parse_rope(raw, theta=theta)
    return rope, RopeConfig(local_theta or rope.theta)


def _longrope(raw: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    """Parse longrope. transformers selects short or long factors by the longest sequence so far, which would invalidate
    cached keys; here the served context length decides for all sequences."""
    name = "original_max_position_embeddings"
    context = int(raw["max_position_embeddings"])
    original = int(raw.get(name) or scaling.get(name) or context)
    factor = float(scaling.get("factor") or context / original)
    given_factor = scaling.get("attention_factor")
    if given_factor is None:
        given_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    short, long = (tuple(float(value) for value in scaling[key]) for key in ("short_factor", "long_factor"))
    if len(short) != len(long) or not all(value > 0 for value in (*short, *long)):
        raise ConfigError("config.json: rope_type longrope: short_factor, long_factor: must be positive, of one length")
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=float(given_factor),
        short_factors=short,
        long_factors=long,
    )


def _dynamic(raw: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    original, factor = int(raw["max_position_embeddings"]), float(scaling["factor"])
    if factor < 1.0:
        raise ConfigError(f"config.json: rope_type dynamic: factor {factor:g} must be at least 1")
    if scaling.get("alpha"):
        raise ConfigError(f"config.json: rope_type dynamic: alpha: {scaling['alpha']}: a fixed scale is not supported")
    name = "original_max_position_embeddings"
    if int(configured := scaling.get(name) or original) != original:
        raise ConfigError(
            f"config.json: rope_type dynamic: {name}: {configured}: must equal max_position_embeddings, {original}"
        )
    return RopeConfig(theta, "dynamic", factor, original_max_position=original)


def _yarn(raw: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    """Parse YaRN with transformers' defaults: the paper's, and the whole context as the original one."""
    name = "original_max_position_embeddings"
    original = int(raw.get(name) or scaling.get(name) or raw["max_position_embeddings"])
    given = scaling["factor"]  # null: the ratio of the context lengths
    factor = int(raw["max_position_embeddings"]) / original if given is None else float(given)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    if factor < 1.0 or fast < slow:
        raise ConfigError(
            f"config.json: rope_type yarn: factor {factor:g} must be at least 1, "
            f"and beta_fast {fast:g} at least beta_slow {slow:g}"
        )
    given_factor = scaling.get("attention_factor")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=float(given_factor)
        if given_factor is not None
        else attention_factor(factor, float(scaling.get("mscale") or 0), float(scaling.get("mscale_all_dim") or 0)),
        truncate=bool(scaling.get("truncate", True)),
    )


def context_length(raw: Mapping[str, Any], rope: RopeConfig) -> int:
    """Return the number of positions of a model. YaRN extends `max_position_embeddings`, because users enable it by
    adding only its fields to a config.json."""
    positions = int(raw["max_position_embeddings"])
    return max(positions, int(rope.original_max_position * rope.factor)) if rope.rope_type == "yarn" else positions
