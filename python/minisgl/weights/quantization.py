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


def parse_packing(raw: Mapping[str, Any]) -> Packing | None:
    """Return the packing that a config.json names; None if weights are not packed. Raises `ConfigError`."""
    said = raw.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping) or not said.get("quant_method"):
        raise refused("quant_method", None if not isinstance(said, Mapping) else said.get("quant_method"), "is missing")
    match said["quant_method"]:
        case "awq":
            return _awq(said)
        case "gptq":
            return _gptq(said)
        case "compressed-tensors":
            return _compressed(said)
        case "fp8":
            return _fp8(said)
        case "mxfp4":
            return Packing("mxfp4", "mxfp4", 4)
        case method:
            raise refused("quant_method", method, f"only {', '.join(METHODS)}")


def refused(field: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config: {field}: {value!r}: {reason}")


def _one_of(said: Mapping[str, Any], field: str, allowed: tuple[object, ...], default: object = None) -> Any:
    value = said.get(field, default)
    if value not in allowed:
        raise refused(field, value, f"only {', '.join(map(str, allowed))}")
    return value


def _awq(said: Mapping[str, Any]) -> Packing:
    _one_of({"version": str(said.get("version", "gemm")).lower()}, "version", ("gemm",))
    _one_of(said, "zero_point", (True,), True)
    return Packing("awq", "awq", _one_of(said, "bits", (4,), said.get("w_bit")))


def _gptq(said: Mapping[str, Any]) -> Packing:
    """Return GPTQ's packing. Format "gptq" stores zero points minus one, "gptq_v2" as they are."""
    bits = _one_of(said, "bits", (4, 8))
    _one_of(said, "is_marlin_format", (False, None))
    stored = _one_of(said, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Packing("gptq", "gptq", bits, zero_offset=1 if stored == "gptq" else 0)


def _compressed(said: Mapping[str, Any]) -> Packing:
    kept = _one_of(said, "format", (*_INTEGERS, _FLOATS, "naive-quantized"))
    _one_of(said, "quantization_status", ("compressed",), "compressed")
    if (sparsity := said.get("sparsity_config")) and sparsity.get("format", "dense") != "dense":
        raise refused("sparsity_config", sparsity.get("format"), "sparse weights are not read")
    if said.get("transform_config"):
        raise refused("transform_config", "...", "weights that are rotated are not computed")
    groups = list((said.get("config_groups") or {}).values())
    if not groups or any(not isinstance(one, Mapping) or not one.get("weights") for one in groups):
        raise refused("config_groups", said.get("config_groups"), "must say how weights are kept")
    kinds = {(one["weights"].get("type", "int"), one["weights"].get("num_bits")) for one in groups}
    own = {one.get("format", kept) for one in groups}
    if len(kinds) > 1 or own - {kept, None}:
        raise refused("config_groups", sorted(map(str, kinds)), "layers of several kinds are not read")
    ((kind, bits),) = kinds
    rounds = any(one.get("input_activations") for one in groups) or bool(said.get("kv_cache_scheme"))
    if kind == "float" and bits == 8 and kept not in _INTEGERS:
        block = _block(groups[0]["weights"], "block_structure")
        return Packing("compressed-tensors", "float8", 8, block=block, rounds_activations=rounds)
    if kind != "int" or kept == _FLOATS:
        raise refused("config_groups", f"{kind}, {bits} bits, {kept}", "only int of 4 and 8 bits, float of 8")
    if kept == "pack-quantized" and bits in (4, 8):
        return Packing("compressed-tensors", "packed", bits, rounds_activations=rounds)
    if kept != "pack-quantized" and bits in (4, 8):
        return Packing("compressed-tensors", "int8", bits, rounds_activations=rounds)
    raise refused("num_bits", bits, "only 4 and 8")


def _fp8(said: Mapping[str, Any]) -> Packing:
    _one_of(said, "fmt", ("e4m3", "float8_e4m3fn", None))
    return Packing("fp8", "float8", 8, block=_block(said, "weight_block_size"), rounds_activations=True)


def _block(said: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    value = said.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise refused(field, value, "must be two numbers")
    return value[0], value[1]
