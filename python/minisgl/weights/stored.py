"""Tensors of safetensors files, read without torch: headers and values; writing of small files.

Invariants: a malformed header is an error before any value is read; neither torch nor the library safetensors is
imported: the CPU engine does not need them.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError

_MAX_HEADER_BYTES = 100_000_000
_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
INDEX = "model.safetensors.index.json"
_SHOWN = 8
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file: its dtype, shape and offset in bytes."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.kind]

    def data(self, opened: BinaryIO) -> bytes:
        """Read the tensor's bytes from its file, `opened`. Raises `ConfigError` if the file is too short."""
        opened.seek(self.start)
        data = opened.read(self.nbytes)
        if len(data) != self.nbytes:
            raise ConfigError(f"{self.file.name}: {self.name}: the file was truncated")
        return data

    def numbers(self, opened: BinaryIO) -> npt.NDArray[Any]:
        """Read the tensor from its file, `opened`: floats as float32, integers unchanged. Raises `ConfigError`."""
        return _decoded(self.kind, self.data(opened)).reshape(self.shape)

    def read(self) -> npt.NDArray[Any]:
        """Open the file and read the tensor: floats as float32, integers unchanged. Raises `ConfigError`."""
        with opened(self.file) as file:
            return self.numbers(file)


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises `ConfigError`, also for a pipe, which would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path.name}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, by its index if it has one. Raises `ConfigError` if one is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{INDEX}: {error!r}: not a safetensors index") from error
        files = [folder / name for name in names]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder.name}: no *.safetensors: convert the weights, or try --load-format dummy")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder.name}: {INDEX} names missing files: {', '.join(absent[:_SHOWN])}")
    return files


def stored_tensors(path: Path) -> list[Stored]:
    """Parse a safetensors header: length (8 bytes), then names, dtypes, shapes and offsets. Raises `ConfigError`."""
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ConfigError(f"{path.name}: is not a safetensors file")
        begin, size = 8 + length, file.seek(0, 2)
        file.seek(8)
        try:
            head = json.loads(file.read(length))
            return [_stored(path, name, entry, begin, size) for name, entry in head.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path.name}: is not a valid safetensors file: {error}") from error


def header_of(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file of float32 tensors, which follow in this order."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        start, end = end, end + 4 * math.prod(shape)
        head[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    with path.open("wb") as file:
        file.write(header_of((name, tensor.shape) for name, tensor in tensors.items()))
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, "<f4").data)


def _stored(path: Path, name: str, entry: Mapping[str, Any], begin: int, size: int) -> Stored:
    kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in _BYTES:
        raise ValueError(f"{name}: {kind}: must be one of {', '.join(_BYTES)}")
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"{name}: {shape}: must be whole numbers, at least 0")
    if end - start != math.prod(shape) * _BYTES[kind] or begin + end > size:
        raise ValueError(f"{name}: must lie within the file, with the bytes of its shape")
    return Stored(path, name, kind, tuple(shape), begin + start)


def _decoded(kind: str, data: bytes) -> npt.NDArray[Any]:
    values: npt.NDArray[Any]
    match kind:
        case "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        case "F8_E4M3":
            values = _E4M3[np.frombuffer(data, np.uint8)]
        case "F8_E8M0":  # a power of two
            values = np.exp2(np.frombuffer(data, np.uint8).astype(np.float32) - 127.0, dtype=np.float32)
        case "F32" | "F16" | "F64":
            values = np.frombuffer(data, f"<f{_BYTES[kind]}").astype(np.float32)
        case "BOOL":
            values = np.frombuffer(data, np.bool_)
        case _:
            values = np.frombuffer(data, f"<{kind[0].lower()}{_BYTES[kind]}")
    return values


def _e4m3() -> npt.NDArray[np.float32]:
    """Return the 256 values of e4m3fn (OCP 8-bit float): 4 exponent bits with bias 7, 3 of mantissa, no infinities."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3()
