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
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole layers in addition to A and B are not supported",
    "bias": "biases are not supported",
    "lora_bias": "biases are not supported",
    "alpha_pattern": "a scale by layer is not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "layer_replication": "layers that are used twice are not supported",
    "target_parameters": "only linear layers are supported: not routed experts, whose weights are one parameter",
    "trainable_token_indices": "adapters of embeddings are not supported",
    "use_qalora": "pooled inputs are not supported",
    "use_bdlora": "blocks of A and B are not supported",
    "arrow_config": "a selection among adapters is not supported",
    "alora_invocation_tokens": "an adapter that starts at a token is not supported",
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
        raise ConfigError(f"{CONFIG}: must be at most {MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{CONFIG}: must be an object")
    if (kind := raw.get("peft_type", "LORA")) != "LORA":
        raise ConfigError(f"{CONFIG}: peft_type: {kind!r}: only LORA is supported")
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
    by_module: dict[str, dict[str, Stored]] = {}
    for tensor in _tensors(file):
        parts = _TENSOR.fullmatch(tensor.name)
        if parts is None:
            raise ConfigError(f"{WEIGHTS}: {tensor.name}: only lora_A and lora_B of linear layers are supported")
        by_module.setdefault(parts["module"], {})[parts["kind"]] = tensor
    if not by_module:
        raise ConfigError(f"{WEIGHTS}: is empty")
    return Adapter(file, {module: _pair(module, stored, config) for module, stored in sorted(by_module.items())})


def _pair(module: str, stored: Mapping[str, Stored], config: AdapterConfig) -> Pair:
    if missing := {"A", "B"} - stored.keys():
        raise ConfigError(f"{WEIGHTS}: {module}: lora_{missing.pop()} is missing")
    a, b = stored["A"], stored["B"]
    rank = a.shape[0]
    if rank != b.shape[1] or not rank:
        raise ConfigError(f"{WEIGHTS}: {module}: A is {list(a.shape)} and B {list(b.shape)}: not [r, in] and [out, r]")
    if rank > MAX_RANK:
        raise ConfigError(f"{WEIGHTS}: {module}: rank {rank}: must be at most {MAX_RANK}")
    return Pair(a, b, config.scale(rank))


def _finite(stored: Stored, file: BinaryIO) -> Float32Array:
    """Return a tensor's values. Raises `ConfigError` if one is not finite: it would fail the adapter's requests."""
    values = stored.numbers(file)
    if not np.isfinite(values).all():
        raise ConfigError(f"{WEIGHTS}: {stored.name}: a value is not finite")
    return values


def _tensors(path: Path) -> list[Stored]:
    tensors = stored_tensors(path)
    for tensor in tensors:
        if tensor.kind not in FLOATS:
            raise ConfigError(f"{path.name}: {tensor.name}: {tensor.kind}: must be one of {', '.join(FLOATS)}")
        if len(tensor.shape) != 2:
            raise ConfigError(f"{path.name}: {tensor.name}: {list(tensor.shape)}: must have two dimensions")
    return tensors
