"""Packed checkpoints for the CPU engine: weights converted once to its blocks of 8 or 4 bits, and kept in the cache.

| what is packed | blocks | what is lost |
|---|---|---|
| 4 bits, contiguous groups of at least 32 inputs | Q4_1; Q4_0 if zero points are 8 | half precision of both scales |
| 8 bits, zero points in the middle, such groups | Q8_0 | half precision of the scale |
| float8; other groups, other zero points | Q8_0, rounded anew | 1/254 of the largest of 32, and the above |

Invariants: the file appears whole or not at all, and its name identifies its sources; all other tensors of the
checkpoint are unchanged; a weight that fits no block is kept in float32.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.utils.made_once import made_once
from minisgl.utils.progress import Report, track
from minisgl.weights.packed import Floats, PackedFolder, Quants
from minisgl.weights.quantization import Packing
from minisgl.weights.stored import Stored, opened

FORMAT = "1"  # part of the cached file's name
NAME = "model.gguf"
BLOCK = 32
_ALIGNMENT = 64
_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}  # ggml's type ids
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
Bytes = npt.NDArray[np.uint8]


def packed_weights(files: Sequence[Path], packing: Packing, say: Report) -> Path:
    """Return the GGUF file for the checkpoint in `files`, created now if it is not cached. Raises `ConfigError`."""
    key = hashlib.sha256(f"{FORMAT} {packing!r}\n".encode())
    try:
        for file in files:
            path = file.resolve()
            now = path.stat()
            key.update(f"{file.name}\n{path}\n{now.st_size}\n{now.st_mtime_ns}\n".encode())
    except OSError as error:
        raise ConfigError(f"{files[0].parent.name}: {error}") from error
    folder = envs.cache_dir() / "packed" / key.hexdigest()[:32]
    return made_once(folder, lambda partial: _write(files, packing, partial / NAME, say)) / NAME


def _write(files: Sequence[Path], packing: Packing, target: Path, say: Report) -> None:
    """Write the GGUF file; the header last, because a weight's block type is known only after it has been read."""
    source = PackedFolder(files, packing)
    others = [name for name, tensor in source.others.items() if tensor.kind in _TYPES]
    names, entries = [*source.layers, *others], list[_BlockTensor]()
    behind = target.with_suffix(".data")
    with behind.open("w+b") as body:
        for name in track(say, f"turning {packing} into blocks, once", names, len(names)):
            layer = name in source.layers
            entries.append(_layer(source, name, body) if layer else _other(source.others[name], body))
        body.seek(0)
        with target.open("wb") as out:
            _head(out, entries)
            shutil.copyfileobj(body, out, 1 << 24)
    behind.unlink()


@dataclass(frozen=True, slots=True)
class _BlockTensor:
    """A tensor of the GGUF file: its type, shape, and offset after the header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int


def _layer(source: PackedFolder, name: str, body: BinaryIO) -> _BlockTensor:
    weight = source.weight(name)
    kind, data = to_blocks(weight)
    if kind in ("Q4_0", "Q4_1", "Q8_0") and not np.isfinite(_block_scales(kind, data)).all():
        raise ConfigError(f"{name}: a scale is too large for half precision")
    shape = weight.integers.shape if isinstance(weight, Quants) else weight.shape
    return _BlockTensor(name, kind, shape, _put(body, data.tobytes()))


def _other(stored: Stored, body: BinaryIO) -> _BlockTensor:
    with opened(stored.file) as file:
        return _BlockTensor(stored.name, stored.kind, stored.shape, _put(body, stored.data(file)))


def _put(body: BinaryIO, data: bytes) -> int:
    body.write(bytes(-body.tell() % _ALIGNMENT))
    at = body.tell()
    body.write(data)
    return at


def _head(out: BinaryIO, entries: Sequence[_BlockTensor]) -> None:
    """Write a GGUF header: magic, version 3, counts, a setting; tensors by name, shape (innermost first), type,
    offset."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    out.write(b"GGUF" + struct.pack("<IQQ", 3, len(entries), 1))
    out.write(text("general.alignment") + struct.pack("<II", 4, _ALIGNMENT))
    for entry in entries:
        out.write(text(entry.name) + struct.pack("<I", len(entry.shape)))
        out.write(struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape)))
        out.write(struct.pack("<IQ", _TYPES[entry.kind], entry.offset))
    out.write(bytes(-out.tell() % _ALIGNMENT))


def to_blocks(weight: Quants | Floats) -> tuple[str, Bytes]:
    """Return the block type that represents a weight [out, in] best, and its bytes, row after row."""
    columns = (weight.integers if isinstance(weight, Quants) else weight).shape[1]
    if columns % BLOCK:
        full = weight.full() if isinstance(weight, Quants) else weight
        return "F32", np.ascontiguousarray(full, "<f4").view(np.uint8)
    if isinstance(weight, Quants):
        if (by_block := _by_block(weight)) is None:
            return "Q8_0", q8_0(weight.full())
        scales, zeros = by_block
        if weight.integers.max(initial=0) < 16:
            return _q4(weight.integers, scales, zeros)
        if (zeros == 128).all():
            return "Q8_0", _join_parts(
                _to_half(scales), _in_blocks(weight.integers - 128).astype(np.int8).view(np.uint8)
            )
        return "Q8_0", q8_0(weight.full())
    return "Q8_0", q8_0(weight)


def _by_block(weight: Quants) -> tuple[Floats, Floats] | None:
    """Return scale and zero point of each block, [out, blocks] each; None if a block spans several groups."""
    groups = weight.groups.reshape(-1, BLOCK)
    if (groups != groups[:, :1]).any():
        return None
    return weight.scales[:, groups[:, 0]], weight.zeros[:, groups[:, 0]]


def _in_blocks(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return rows.reshape(len(rows), -1, BLOCK)


def _to_half(numbers: Floats) -> Bytes:
    """Convert [...] float32 to the bytes of float16, [..., 2]."""
    with np.errstate(over="ignore"):  # an infinite scale is an error later
        return np.ascontiguousarray(numbers[..., None].astype("<f2")).view(np.uint8)


def _join_parts(*parts: Bytes) -> Bytes:
    """Concatenate parts of blocks, [out, blocks, bytes] each."""
    return np.ascontiguousarray(np.concatenate(parts, axis=2))


def _q4(integers: npt.NDArray[np.int32], scales: Floats, zeros: Floats) -> tuple[str, Bytes]:
    """Return Q4 blocks: a block's first half of values in the low halves of its bytes, the second in the high ones."""
    low, high = np.split(_in_blocks(integers).astype(np.uint8), 2, axis=2)
    nibbles = (low | high << 4).astype(np.uint8)
    if (zeros == 8).all():
        return "Q4_0", _join_parts(_to_half(scales), nibbles)
    return "Q4_1", _join_parts(_to_half(scales), _to_half(-scales * zeros), nibbles)


def q8_0(weight: Floats) -> Bytes:
    """Quantize floats to Q8_0 like rust/minisgl-cpu/src/files/quantize.rs: round to nearest, scale by block maximum."""
    blocks = _in_blocks(weight)
    scales = (np.abs(blocks).max(axis=2) / np.float32(127)).astype(np.float32, copy=False)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    quants = np.rint(blocks * inverse[..., None]).astype(np.int8)
    return _join_parts(_to_half(scales), quants.view(np.uint8))


def _block_scales(kind: str, data: Bytes) -> npt.NDArray[np.float16]:
    """Return the float16 scales of blocks (with Q4_1 also their minima)."""
    size = 4 if kind == "Q4_1" else 2
    heads = np.ascontiguousarray(data.reshape(-1, _BLOCK_BYTES[kind])[:, :size])
    return heads.view("<f2")
