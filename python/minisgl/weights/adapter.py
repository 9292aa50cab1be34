"""Adapters in the format of the library peft: what a folder says of itself, and the tensors in it.

An adapter (LoRA; Hu et al. 2021) makes y + scale * B (A x) of a linear layer's y = W x.

Keeps true: what would change the model in a way that nobody here computes is refused by name; numbers are float32
whatever the file has; neither torch nor the library safetensors is imported: the CPU engine has neither.
Doesn't know: the model that it is for.
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

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Float32Array = npt.NDArray[np.float32]
_MAX_HEADER_BYTES = 100_000_000
_KINDS = {"F32": 4, "F16": 2, "BF16": 2}
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>[AB])(?:\.default)?\.weight")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# fields that change what is computed, or what is stored -> what they would mean
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
class Stored:
    """A tensor of a file: two dimensions, and where it lies."""

    name: str
    kind: str
    shape: tuple[int, int]
    start: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A [rank, in] and B [out, rank] of one linear layer."""

    a: Stored
    b: Stored
    scale: float

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the layer: inputs, outputs."""
        return self.a.shape[1], self.b.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """`pairs`: by the layer that they change, such as "model.layers.0.self_attn.q_proj"."""

    file: Path
    pairs: Mapping[str, Pair]

    def read(self) -> dict[str, tuple[Float32Array, Float32Array]]:
        """A and scale * B of each layer. Raises `ConfigError`."""
        with _opened(self.file) as file:
            return {
                name: (_numbers(file, pair.a), _numbers(file, pair.b) * np.float32(pair.scale))
                for name, pair in self.pairs.items()
            }


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    alpha: float
    is_rank_stabilized: bool

    def scale(self, rank: int) -> float:
        """alpha / r; rank-stabilized, alpha / sqrt(r) (Kalajdzievski 2023)."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def load_adapter_config(folder: Path) -> AdapterConfig:
    """Raises `ConfigError`."""
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder}: {CONFIG}: {error.strerror}: an adapter is a folder as peft saves it") from error
    except ValueError as error:
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{CONFIG}: {name}: {value!r}: must be a number")
    return float(value)


def load_adapter(folder: Path) -> Adapter:
    """What is in the folder, without the numbers. Raises `ConfigError`."""
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
    return Pair(a, b, config.scale(rank))


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise ConfigError(f"{file.name}: {error.strerror}") from error


def _tensors(path: Path) -> list[Stored]:
    """What the head of a safetensors file says: its length (8 bytes), names with types, shapes and places."""
    with _opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ConfigError(f"{path.name}: is no safetensors file")
        begin, size = 8 + length, file.seek(0, 2)
        file.seek(8)
        try:
            head = json.loads(file.read(length))
            found = [_stored(name, one, begin, size) for name, one in head.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path.name}: is no sound safetensors file: {error}") from error
    return found


def _stored(name: str, said: Mapping[str, Any], begin: int, size: int) -> Stored:
    kind, shape, (start, end) = said["dtype"], said["shape"], said["data_offsets"]
    if kind not in _KINDS:
        raise ValueError(f"{name}: {kind}: one of {', '.join(_KINDS)}")
    if len(shape) != 2 or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"{name}: {shape}: must have two dimensions")
    if end - start != shape[0] * shape[1] * _KINDS[kind] or begin + end > size:
        raise ValueError(f"{name}: does not lie in the file")
    return Stored(name, kind, (shape[0], shape[1]), begin + start)


def _numbers(file: BinaryIO, stored: Stored) -> Float32Array:
    rows, columns = stored.shape
    file.seek(stored.start)
    data = file.read(rows * columns * _KINDS[stored.kind])
    if len(data) != rows * columns * _KINDS[stored.kind]:
        raise ConfigError(f"{WEIGHTS}: {stored.name}: the file has become shorter")
    found: Float32Array
    match stored.kind:
        case "F32":
            found = np.frombuffer(data, "<f4").astype(np.float32)
        case "F16":
            found = np.frombuffer(data, "<f2").astype(np.float32)
        case _:  # bfloat16: the upper half of a float32
            found = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return found.reshape(rows, columns)
