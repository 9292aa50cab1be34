"""Checkpoints with packed linear layers: the tensors that make up a layer's weight, and its value.

A weight is scale * (integer - zero point), with scale and zero point by group of inputs, or scale * an 8-bit float.
`minisgl.weights.quantization` names the formats.

Invariants: a layer with a missing or misfitting tensor is an error that names it; one layer at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError
from minisgl.weights.quantization import Form, Packing
from minisgl.weights.stored import Stored, stored_tensors

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

# parts of a layer: (required, optional). A float8 weight has weight_scale or, by blocks, weight_scale_inv
_PARTS: Mapping[Form, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "awq": (("qweight", "qzeros", "scales"), ()),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "packed": (("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx")),
    "int8": (("weight", "weight_scale"), ("weight_zero_point", "weight_g_idx")),
    "float8": (("weight",), ("weight_scale", "weight_scale_inv")),
}
_PACKED_DTYPES = {"int8": "I8", "float8": "F8_E4M3"}  # dtype that distinguishes a packed weight from a full one
# scales of activations and of the KV cache, which are not quantized here
_OF_ACTIVATIONS = tuple(
    f".{kind}_{what}" for kind in ("input", "output", "k", "v", "q") for what in ("scale", "zero_point", "global_scale")
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output index of each 4 bits, from the lowest on


@dataclass(frozen=True, slots=True)
class Quants:
    """A quantized weight, scales * (integers - zeros). `integers` [out, in] >= 0, `scales` and `zeros` [out, groups],
    `groups` [in]: the group of each input."""

    integers: Integers
    scales: Floats
    zeros: Floats
    groups: npt.NDArray[np.intp]

    def full(self) -> Floats:
        """Return the dequantized weight [out, in]."""
        weight: Floats = (self.integers - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        return weight


class PackedFolder:
    """The tensors of a folder: packed layers, by the name of their weight, and the others."""

    def __init__(self, files: Sequence[Path], packing: Packing) -> None:
        """Locate the tensors. Raises `ConfigError` if a layer lacks one, or if none is packed in this format."""
        self._packing = packing
        self.others: dict[str, Stored] = {}
        self.layers: dict[str, dict[str, Stored]] = {}
        if packing.form not in _PARTS:
            raise ConfigError(f"config.json: quantization_config: {packing}: not supported by torch: use --engine cpu")
        needed, perhaps = _PARTS[packing.form]
        stored = {tensor.name: tensor for file in files for tensor in stored_tensors(file)}
        for name, tensor in stored.items():
            module, _, part = name.rpartition(".")
            is_packed = part in (*needed, *perhaps)
            if is_packed and (kind := _PACKED_DTYPES.get(packing.form)):
                weight = stored.get(f"{module}.weight")
                is_packed = weight is not None and weight.kind == kind
            if is_packed:
                self.layers.setdefault(f"{module}.weight", {})[part] = tensor
            elif not name.endswith(_OF_ACTIVATIONS):
                self.others[name] = tensor
        for name, parts in self.layers.items():
            if missing := [part for part in needed if part not in parts]:
                raise ConfigError(f"{name}: packed as {packing}, but {missing[0]} is missing")
        if not self.layers:
            raise ConfigError(f"config.json: quantization_config: {packing.method}: no layer is packed in this format")

    def is_empty_bias(self, name: str) -> bool:
        """Return whether a tensor is an all-zero bias of a packed layer, as GPTQ tools write for models without one."""
        if not name.endswith(".bias") or f"{name.removesuffix('bias')}weight" not in self.layers:
            return False
        return not self.others[name].read().any()

    def full(self, name: str) -> Floats:
        """Return the weight [out, in] of a packed layer in float32. Raises `ConfigError`."""
        weight = self.weight(name)
        return weight.full() if isinstance(weight, Quants) else weight

    def weight(self, name: str) -> Quants | Floats:
        """Return a packed layer's weight: integers with scales, or floats, already scaled. Raises `ConfigError`."""
        parts = {part: tensor.read() for part, tensor in self.layers[name].items()}
        try:
            match self._packing.form:
                case "awq":
                    return _awq(parts)
                case "gptq":
                    return _gptq(parts, self._packing)
                case "packed":
                    return _packed(parts, self._packing.bits)
                case "int8":
                    return _int8(parts["weight"].astype(np.int32) + 128, parts, 128)
                case "float8":
                    return _float8(parts, self._packing.block)
                case "mxfp4":
                    _misshaped("is refused before")
        except ValueError as error:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in self.layers[name].items())
            raise ConfigError(f"{name}: {error}: {shapes}") from error


def _misshaped(reason: str) -> NoReturn:
    raise ValueError(reason)


def _unpack(packed: npt.NDArray[Any], bits: int) -> Integers:
    """Unpack [a, b] int32 to [a, b * 32 / bits] unsigned integers, the lowest bits first."""
    if packed.ndim != 2 or packed.dtype != np.int32:
        _misshaped("packed integers must be int32 of two dimensions")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    apart = packed.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return apart.astype(np.int32).reshape(len(packed), -1)


def _groups(num_inputs: int, num_groups: int, given: npt.NDArray[Any] | None) -> npt.NDArray[np.intp]:
    """Return the group of each input: as `given`, else contiguous groups of equal size. Raises `ValueError`."""
    if given is not None and given.size and int(given.min()) >= 0:  # -1: not given
        if given.shape != (num_inputs,) or int(given.max()) >= num_groups:
            _misshaped(f"a group of {num_groups} must be given for each of {num_inputs} inputs")
        return given.astype(np.intp)
    if not num_groups or num_inputs % num_groups:
        _misshaped(f"{num_inputs} inputs are not {num_groups} groups")
    return np.arange(num_inputs) // (num_inputs // num_groups)


def _checked(integers: Integers, scales: Floats, zeros: Floats, given: npt.NDArray[Any] | None) -> Quants:
    """Check shapes and finiteness; return the weight. `scales` are [out, groups], `zeros` too, or [1, 1]."""
    if scales.ndim != 2 or len(scales) != len(integers) or zeros.shape not in (scales.shape, (1, 1)):
        _misshaped(f"{list(integers.shape)} integers with scales of {list(scales.shape)}, zeros of {list(zeros.shape)}")
    if not np.isfinite(scales).all():
        _misshaped("a scale is not finite")
    zeros = np.broadcast_to(zeros, scales.shape).astype(np.float32)
    return Quants(integers, scales, zeros, _groups(integers.shape[1], scales.shape[1], given))


def _awq(parts: Mapping[str, npt.NDArray[Any]]) -> Quants:
    """Unpack AWQ: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    order = np.argsort(_AWQ_ORDER)

    def apart(packed: npt.NDArray[Any]) -> Integers:
        values = _unpack(packed, 4)
        return values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape)

    zeros = apart(parts["qzeros"]).T.astype(np.float32)
    return _checked(apart(parts["qweight"]).T, parts["scales"].T, zeros, None)


def _gptq(parts: Mapping[str, npt.NDArray[Any]], packing: Packing) -> Quants:
    """Unpack GPTQ: qweight [in / n, out], qzeros [groups, out / n], scales [groups, out] with n integers in an int32.
    The offset of zero points wraps around, as in the tools that pack them."""
    bits = packing.bits
    integers = _unpack(np.ascontiguousarray(parts["qweight"].T), bits)
    zeros = _unpack(parts["qzeros"], bits) + packing.zero_offset & (1 << bits) - 1
    scales = parts["scales"]
    if scales.ndim != 2 or zeros.shape[0] != scales.shape[0] or zeros.shape[1] < scales.shape[1]:
        _misshaped("zero points do not fit the scales")
    zeros = zeros[:, : scales.shape[1]]  # the last int32 may be padded
    return _checked(integers, scales.T, zeros.T.astype(np.float32), parts.get("g_idx"))


def _packed(parts: Mapping[str, npt.NDArray[Any]], bits: int) -> Quants:
    """Unpack compressed-tensors: weight_packed [out, in / n], weight_scale [out, groups], weight_zero_point [out / n,
    groups]; half of the range is added to each integer."""
    if parts["weight_shape"].size != 2:
        _misshaped("weight_shape must be two numbers")
    rows, columns = (int(size) for size in parts["weight_shape"].ravel())
    integers = _unpack(parts["weight_packed"], bits)
    if len(integers) != rows or not 0 <= integers.shape[1] - columns < 32 // bits:
        _misshaped(f"weight_shape says [{rows}, {columns}]")
    zeros = np.full((1, 1), 1 << bits - 1, np.float32)
    if (packed := parts.get("weight_zero_point")) is not None:
        zeros = _unpack(np.ascontiguousarray(packed.T), bits).T[:rows].astype(np.float32)
    return _checked(integers[:, :columns], _by_output(parts, rows), zeros, parts.get("weight_g_idx"))


def _int8(integers: Integers, parts: Mapping[str, npt.NDArray[Any]], zero: int) -> Quants:
    """Return the weight of unpacked `integers` [out, in], to which `zero` was added."""
    if integers.ndim != 2:
        _misshaped("a weight must have two dimensions")
    zeros = np.full((1, 1), zero, np.float32)
    if (given := parts.get("weight_zero_point")) is not None and given.size:
        zeros = _broadcast(given.astype(np.float32), len(integers)) + zero
    return _checked(integers, _by_output(parts, len(integers)), zeros, parts.get("weight_g_idx"))


def _by_output(parts: Mapping[str, npt.NDArray[Any]], rows: int) -> Floats:
    return _broadcast(parts["weight_scale"], rows)


def _broadcast(numbers: Floats, rows: int) -> Floats:
    """Return one value for the whole tensor, or values for each output, as [rows, groups]."""
    if numbers.size == 1:
        return np.full((rows, 1), numbers.item(), np.float32)
    return numbers.reshape(rows, -1) if numbers.ndim == 1 else numbers


def _float8(parts: Mapping[str, npt.NDArray[Any]], block: tuple[int, int] | None) -> Floats:
    """Dequantize float8: weight [out, in]; one scale, one for each output, or one for each block of a grid."""
    weight = parts["weight"]
    scale = parts.get("weight_scale", parts.get("weight_scale_inv"))
    if scale is None or weight.ndim != 2:
        _misshaped("a float8 weight needs weight_scale or weight_scale_inv")
    if not np.isfinite(scale).all() or not np.isfinite(weight).all():
        _misshaped("a number is not finite")
    rows, columns = weight.shape
    if scale.size == 1:
        scale = scale.reshape(1, 1)
    elif scale.size == rows:
        scale = scale.reshape(rows, 1)
    elif block is not None and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
        scale = scale.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
    else:
        _misshaped("scales that are neither one, nor one for each output, nor one for each block")
    scaled: Floats = weight * scale
    return scaled
