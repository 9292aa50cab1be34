"""What a config.json says about rotary embeddings, in both of transformers' spellings: `rope_parameters` (5), and
`rope_scaling` with `rope_theta` beside it (4).

Invariants: every field that changes the angles is read or refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.config import ConfigError
from minisgl.rope import RopeConfig, attention_factor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Raises `ConfigError`; `KeyError` for a field that is missing."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope_type: {kind!r} is not supported: only {', '.join(ROPE_TYPES)}")
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor: only 1.0 is supported")
    if scaling.get("llama_4_scaling_beta"):
        raise ConfigError("config.json: llama_4_scaling_beta: queries scaled by their position are not supported")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    if kind == "dynamic":
        return _dynamic(raw, scaling, theta)
    if kind == "yarn":
        return _yarn(raw, scaling, theta)
    return RopeConfig(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def parse_gemma_rope(raw: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that attend to all tokens, and of those with a window (Gemma 3). The defaults are transformers'."""
    both = raw.get("rope_parameters") or {}
    if "full_attention" in both:
        full, local = (
            {**raw, "rope_parameters": both.get(kind) or {}} for kind in ("full_attention", "sliding_attention")
        )
    else:
        full, local = {"rope_theta": 1_000_000.0, **raw}, {"rope_theta": raw.get("rope_local_base_freq") or 10_000.0}
    for kind in (parsed := (parse_rope(full), parse_rope(local))):
        if kind.rope_type not in ("default", "linear"):
            raise ConfigError(f"config.json: rope_type: {kind.rope_type!r} is not supported with this architecture")
    return parsed


def _dynamic(raw: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    original, factor = int(raw["max_position_embeddings"]), float(scaling["factor"])
    if factor < 1.0:
        raise ConfigError(f"config.json: rope_type dynamic: factor {factor:g} must be at least 1")
    if scaling.get("alpha"):
        raise ConfigError(f"config.json: rope_type dynamic: alpha: {scaling['alpha']}: a fixed scale is not supported")
    name = "original_max_position_embeddings"
    if int(said := scaling.get(name) or original) != original:
        raise ConfigError(
            f"config.json: rope_type dynamic: {name}: {said}: it counts from max_position_embeddings, {original}"
        )
    return RopeConfig(theta, "dynamic", factor, original_max_position=original)


def _yarn(raw: Mapping[str, Any], scaling: Mapping[str, Any], theta: float) -> RopeConfig:
    """The defaults are transformers': of the paper, and the original context is the whole one if nothing says it."""
    name = "original_max_position_embeddings"
    original = int(raw.get(name) or scaling.get(name) or raw["max_position_embeddings"])
    given = scaling["factor"]  # null: the contexts say it
    factor = int(raw["max_position_embeddings"]) / original if given is None else float(given)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    if factor < 1.0 or fast < slow:
        raise ConfigError(
            f"config.json: rope_type yarn: factor {factor:g} must be at least 1, "
            f"and beta_fast {fast:g} at least beta_slow {slow:g}"
        )
    asked = scaling.get("attention_factor")
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=float(asked)
        if asked is not None
        else attention_factor(factor, float(scaling.get("mscale") or 0), float(scaling.get("mscale_all_dim") or 0)),
        truncate=bool(scaling.get("truncate", True)),
    )


def context_length(raw: Mapping[str, Any], rope: RopeConfig) -> int:
    """How many positions a model has. People switch YaRN on by adding its fields to a config.json whose
    `max_position_embeddings` stays as it was."""
    said = int(raw["max_position_embeddings"])
    return max(said, int(rope.original_max_position * rope.factor)) if rope.rope_type == "yarn" else said
