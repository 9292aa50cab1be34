"""The quantization_config of a config.json: the format of packed weights, and their number of bits.

Formats: AWQ (arXiv 2306.00978, as AutoAWQ writes it), GPTQ (arXiv 2210.17323, as AutoGPTQ and GPTQModel write it),
compressed-tensors (as llm-compressor writes it), float8 with scales by tensor or by block (as DeepSeek writes it), and
MXFP4 (as OpenAI writes it).

Invariants: a field that would change a weight's meaning is read or refused by name. The tensors of a checkpoint, not
the config, show which layers are packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minisgl.config import ConfigError

Form = Literal["awq", "gptq", "packed", "int8", "float8", "mxfp4"]
"""Storage format of a layer's weight: AWQ, GPTQ, integers packed into int32 (compressed-tensors), int8, e4m3 floats, or
blocks of 32 4-bit floats with an exponent (MXFP4), which the CPU engine reads directly."""

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4")
_INTEGERS, _FLOATS = ("pack-quantized", "int-quantized"), "float-quantized"


@dataclass(frozen=True, slots=True)
class Packing:
    """Format of packed weights. `zero_offset`: added to stored zero points. `block`: rows, columns of float8 scales."""

    method: str
    form: Form
    bits: int
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    rounds_activations: bool = False  # the checkpoint asks for rounded activations; here --activations decides

    def __str__(self) -> str:
        return f"{self.method}, {'float8' if self.form == 'float8' else f'{self.bits} bits'}"


def parse_packing(config: Mapping[str, Any]) -> Packing | None:
    """Return the packing that a config.json names; None if weights are not packed. Raises `ConfigError`."""
    raw = config.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or not raw.get("quant_method"):
        raise refused("quant_method", None if not isinstance(raw, Mapping) else raw.get("quant_method"), "is missing")
    match raw["quant_method"]:
        case "awq":
            return _awq(raw)
        case "gptq":
            return _gptq(raw)
        case "compressed-tensors":
            return _compressed(raw)
        case "fp8":
            return _fp8(raw)
        case "mxfp4":
            return Packing("mxfp4", "mxfp4", 4)
        case method:
            raise refused("quant_method", method, f"must be one of {', '.join(METHODS)}")


def refused(field: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config: {field}: {value!r}: {reason}")


def _checked_field(raw: Mapping[str, Any], field: str, allowed: tuple[object, ...], default: object = None) -> Any:
    value = raw.get(field, default)
    if value not in allowed:
        raise refused(field, value, f"must be {' or '.join(map(str, allowed))}")
    return value


def _awq(raw: Mapping[str, Any]) -> Packing:
    _checked_field({"version": str(raw.get("version", "gemm")).lower()}, "version", ("gemm",))
    _checked_field(raw, "zero_point", (True,), True)
    return Packing("awq", "awq", _checked_field(raw, "bits", (4,), raw.get("w_bit")))


def _gptq(raw: Mapping[str, Any]) -> Packing:
    """Return GPTQ's packing. Format "gptq" stores zero points minus one, "gptq_v2" as they are."""
    bits = _checked_field(raw, "bits", (4, 8))
    _checked_field(raw, "is_marlin_format", (False, None))
    stored = _checked_field(raw, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Packing("gptq", "gptq", bits, zero_offset=1 if stored == "gptq" else 0)


def _compressed(raw: Mapping[str, Any]) -> Packing:
    storage = _checked_field(raw, "format", (*_INTEGERS, _FLOATS, "naive-quantized"))
    _checked_field(raw, "quantization_status", ("compressed",), "compressed")
    if (sparsity := raw.get("sparsity_config")) and sparsity.get("format", "dense") != "dense":
        raise refused("sparsity_config", sparsity.get("format"), "sparse weights are not supported")
    if raw.get("transform_config"):
        raise refused("transform_config", "...", "rotated weights are not supported")
    groups = list((raw.get("config_groups") or {}).values())
    if not groups or any(not isinstance(group, Mapping) or not group.get("weights") for group in groups):
        raise refused("config_groups", raw.get("config_groups"), "must give the format of weights")
    kinds = {(group["weights"].get("type", "int"), group["weights"].get("num_bits")) for group in groups}
    own = {group.get("format", storage) for group in groups}
    if len(kinds) > 1 or own - {storage, None}:
        raise refused("config_groups", sorted(map(str, kinds)), "layers of several formats are not supported")
    ((kind, bits),) = kinds
    rounds = any(group.get("input_activations") for group in groups) or bool(raw.get("kv_cache_scheme"))
    if kind == "float" and bits == 8 and storage not in _INTEGERS:
        block = _block(groups[0]["weights"], "block_structure")
        return Packing("compressed-tensors", "float8", 8, block=block, rounds_activations=rounds)
    if kind != "int" or storage == _FLOATS:
        raise refused("config_groups", f"{kind}, {bits} bits, {storage}", "must be int (4, 8 bits) or float (8)")
    if storage == "pack-quantized" and bits in (4, 8):
        return Packing("compressed-tensors", "packed", bits, rounds_activations=rounds)
    if storage != "pack-quantized" and bits in (4, 8):
        return Packing("compressed-tensors", "int8", bits, rounds_activations=rounds)
    raise refused("num_bits", bits, "must be 4 or 8")


def _fp8(raw: Mapping[str, Any]) -> Packing:
    _checked_field(raw, "fmt", ("e4m3", "float8_e4m3fn", None))
    return Packing("fp8", "float8", 8, block=_block(raw, "weight_block_size"), rounds_activations=True)


def _block(raw: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    value = raw.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise refused(field, value, "must be two numbers, at least 1")
    return value[0], value[1]
