"""A model's config.json as the one shape that the layers read.

Keeps true: immutable; every field that changes the computation is read or refused, never ignored.
Doesn't know: weights, devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError
from minisgl.layers import RopeConfig
from minisgl.models.architectures import find_variant

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_ids: tuple[int, ...]


def load_config(model_dir: str | Path) -> ModelConfig:
    """From config.json, with the EOS ids of generation_config.json added. Raises `ConfigError`."""
    folder = Path(model_dir)
    raw = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    try:
        return parse_config(raw, generation)
    except KeyError as error:
        raise ConfigError(f"config.json: {error.args[0]}: missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.json: {error}") from error


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`raw` as transformers writes it: 4 (rope_theta, rope_scaling, torch_dtype) or 5 (rope_parameters, dtype)."""
    architectures = raw.get("architectures") or []
    if not architectures:
        raise ConfigError("config.json: architectures: missing: it says which model this is")
    find_variant(str(architectures[0]))
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act: {raw['hidden_act']!r} is not supported: only silu")
    if raw.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window: not supported by this version")
    if method := (raw.get("quantization_config") or {}).get("quant_method"):
        raise ConfigError(f"config.json: quantization_config: {method!r} is not supported: use the unquantised model")
    num_heads = int(raw["num_attention_heads"])
    head_dim = raw.get("head_dim") or int(raw["hidden_size"]) // num_heads
    eos = {*_ids(raw.get("eos_token_id")), *_ids((generation or {}).get("eos_token_id"))}
    return ModelConfig(
        architecture=str(architectures[0]),
        hidden_size=int(raw["hidden_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(head_dim),
        intermediate_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        max_position=int(raw["max_position_embeddings"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_ids=tuple(sorted(eos)),
    )


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope_type: {kind!r} is not supported: only {', '.join(ROPE_TYPES)}")
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor: only 1.0 is supported")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    return RopeConfig(
        theta,
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(one) for one in value] if isinstance(value, list) else [int(value)]


def _read_json(file: Path, *, required: bool) -> dict[str, Any]:
    if not file.is_file():
        if required:
            raise ConfigError(f"{file.parent.name}: no {file.name}: not a model folder")
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file.name}: must be a JSON object")
    return found
