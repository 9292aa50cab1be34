"""LoRA adapters in the format of the library peft: the config of an adapter folder, and its tensors.

An adapter (LoRA; Hu et al. 2021) makes y + scale * B (A x) of a linear layer's y = W x.

Invariants: a setting that would change the model in an unsupported way is an error that names it; values are float32
whatever dtype the file has; neither torch nor the library safetensors is imported: the CPU engine does not need them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError
from minisgl.weights.stored import FLOATS, Stored, opened, stored_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_RANK, MAX_ALPHA = 1 << 20, 1024, 1e6
Float32Array = npt.NDArray[np.float32]
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.default)?\.weight")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# unsupported fields, and why they would change the result
_REFUSED = {
    "use_dora": "DoRA's magnitudes are not computed",
    "modules_to_save": "whole layers beside A and B are not taken",
    "bias": "biases are not taken",
    "lora_bias": "biases are not taken",
    "alpha_pattern": "a scale by layer is not taken",
    "fan_in_fan_out": "weights that lie the other way round are not taken",
    "layer_replication": "layers that are used twice are not computed",
    "target_parameters": "only linear layers are adapted: routed experts, whose weights lie in one parameter, are not",
    "trainable_token_indices": "embeddings are not adapted",
    "use_qalora": "pooled inputs are not computed",
    "use_bdlora": "blocks of A and B are not taken",
    "arrow_config": "a choice among adapters is not computed",
    "alora_invocation_tokens": "an adapter from some token on is not computed",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """The stored tensors A [rank, in] and B [out, rank] that change one linear layer, and their scale."""

    a: Stored
    b: Stored
    scale: float

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the layer: (inputs, outputs)."""
        return self.a.shape[1], self.b.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose tensors are located but not read; `pairs` are by layer name, such as
    "model.layers.0.self_attn.q_proj"."""

    file: Path
    pairs: Mapping[str, Pair]

    def read(self) -> dict[str, tuple[Float32Array, Float32Array]]:
        """Read A and scale * B by layer. Raises `ConfigError` if a value is not finite or the file cannot be read."""
        with opened(self.file) as file:
            return {
                name: (_finite(pair.a, file), _finite(pair.b, file) * np.float32(pair.scale))
                for name, pair in self.pairs.items()
            }


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    alpha: float
    is_rank_stabilized: bool

    def scale(self, rank: int) -> float:
        """Return the scale alpha / r; rank-stabilized, alpha / sqrt(r) (Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def load_adapter_config(folder: Path) -> AdapterConfig:
    """Load adapter_config.json of `folder`. Raises `ConfigError` if it is malformed or has an unsupported setting."""
    try:
        with opened(folder / CONFIG) as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except ConfigError as error:
        raise ConfigError(f"{error}: an adapter is a folder as peft saves it") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{CONFIG}: more than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{CONFIG}: must be an object")
    if (kind := raw.get("peft_type", "LORA")) != "LORA":
        raise ConfigError(f"{CONFIG}: peft_type: {kind!r}: only LORA is known")
    for name, reason in _REFUSED.items():
        if (value := raw.get(name)) not in _NOTHING:
            raise ConfigError(f"{CONFIG}: {name}: {json.dumps(value)[:80]}: {reason}")
    return AdapterConfig(_number(raw, "lora_alpha"), bool(raw.get("use_rslora")))


def _number(raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise ConfigError(f"{CONFIG}: {name}: {str(value)[:80]}: must be a number from {-MAX_ALPHA:g} to {MAX_ALPHA:g}")
    return float(value)


def load_adapter(folder: Path) -> Adapter:
    """Locate the tensors of the adapter in `folder`. Raises `ConfigError` if one is unknown, missing or misshaped."""
    config, file = load_adapter_config(folder), folder / WEIGHTS
    found: dict[str, dict[str, Stored]] = {}
    for one in _tensors(file):
        parts = _TENSOR.fullmatch(one.name)
        if parts is None:
            raise ConfigError(f"{WEIGHTS}: {one.name}: only A and B of linear layers are known")
        found.setdefault(parts["module"], {})[parts["kind"]] = one
    if not found:
        raise ConfigError(f"{WEIGHTS}: is empty")
    return Adapter(file, {module: _pair(module, stored, config) for module, stored in sorted(found.items())})


def _pair(module: str, stored: Mapping[str, Stored], config: AdapterConfig) -> Pair:
    if missing := {"A", "B"} - stored.keys():
        raise ConfigError(f"{WEIGHTS}: {module}: lora_{missing.pop()} is missing")
    a, b = stored["A"], stored["B"]
    rank = a.shape[0]
    if rank != b.shape[1] or not rank:
        raise ConfigError(f"{WEIGHTS}: {module}: A is {list(a.shape)} and B {list(b.shape)}: not [r, in] and [out, r]")
    if rank > MAX_RANK:
        raise ConfigError(f"{WEIGHTS}: {module}: rank {rank}: at most {MAX_RANK}")
    return Pair(a, b, config.scale(rank))


def _finite(stored: Stored, file: BinaryIO) -> Float32Array:
    """Return a tensor's values. Raises `ConfigError` if one is not finite: it would fail the adapter's requests."""
    found = stored.numbers(file)
    if not np.isfinite(found).all():
        raise ConfigError(f"{WEIGHTS}: {stored.name}: a number is not finite")
    return found


def _tensors(path: Path) -> list[Stored]:
    found = stored_tensors(path)
    for one in found:
        if one.kind not in FLOATS:
            raise ConfigError(f"{path.name}: {one.name}: {one.kind}: one of {', '.join(FLOATS)}")
        if len(one.shape) != 2:
            raise ConfigError(f"{path.name}: {one.name}: {list(one.shape)}: must have two dimensions")
    return found
