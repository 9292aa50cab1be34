"""Import of a GGUF file for torch: it becomes, once, a folder with safetensors, config.json and tokenizer.json.

Invariants: the folder appears whole or not at all; it is keyed by the file's content; dequantized values are exact
(float32); an unsupported tensor or field is an error that names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.utils.installed import need
from minisgl.utils.made_once import made_once
from minisgl.utils.progress import Report, track
from minisgl.weights.gguf_config import READERS, ROPE_FACTORS
from minisgl.weights.gguf_folder import BARE, read_header, write_text_files
from minisgl.weights.names import CHECKPOINT, GGUF
from minisgl.weights.stored import header_of

FORMAT = "8"  # part of the key: increase it when the written files change
Floats = npt.NDArray[np.float32]

_LAYER_PARTS = (
    *("attention_norm", "q", "k", "v", "out", "q_norm", "k_norm"),
    *("mlp_norm", "gate", "up", "down", "router"),
)
_GLOBAL_NAMES = {f"{GGUF[part]}.weight": f"{CHECKPOINT[part]}.weight" for part in ("embedding", "norm", "head")}
_LAYER_NAMES = {str(GGUF[part]): str(CHECKPOINT[part]) for part in _LAYER_PARTS}
_GEMMA_NAMES = _LAYER_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NAMES = {f"ffn_{one}_exps": f"{one}_proj" for one in ("gate", "up", "down")}
_EXPERTS_DIMS = 3
_CHUNK = 1 << 22  # bytes that are decoded at once


def import_gguf(file: Path, say: Report, *, own_tokenizer: bool = True) -> Path:
    """Return the (cached) folder with a GGUF file's weights, and tokenizer if `own_tokenizer`. Raises `ConfigError`."""
    try:
        name = f"{_digest(_rust.gguf_parts(file))[:32]}-{FORMAT}{'' if own_tokenizer else BARE}"
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return made_once(envs.cache_dir() / "gguf" / name, lambda partial: _write(file, partial, say, own_tokenizer))


def _digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 digest of one file, or of the digests of several parts."""
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _write(file: Path, folder: Path, say: Report, own_tokenizer: bool) -> None:
    header = read_header(file)
    config = write_text_files(file, header, folder, own_tokenizer)
    if other_half := tuple(config.get("other_half", ())):
        say("text only: the vision part is not loaded")
    left_out = (ROPE_FACTORS, *other_half)  # the config already has the factors
    tensors = {
        name: kind_and_shape for name, kind_and_shape in header["tensors"].items() if not name.startswith(left_out)
    }
    architecture = header["metadata"]["general.architecture"]
    reader = READERS[architecture]
    if not reader.on_torch or config["architectures"] == ["MixtralForCausalLM"]:
        named = config["architectures"][0]
        raise ConfigError(f"{file.name}: {named}: from a GGUF file only the CPU engine reads it: --engine cpu")
    is_gemma = architecture == "gemma3"
    layer_names = _GEMMA_NAMES if is_gemma else _LAYER_NAMES
    names = {name: _names(name, shape, layer_names, file.name) for name, (_, shape) in tensors.items()}
    rotated: dict[str, int] = {}  # tensors whose rows llama.cpp reorders, with their number of heads
    if reader.interleaved:
        rotated = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    with (folder / "model.safetensors").open("wb") as out, contextlib.ExitStack() as stack:
        opened = {
            part: stack.enter_context(part.open("rb")) for part in {place[0] for place in header["places"].values()}
        }
        # written by hand: the library wants all tensors in memory at once, and a dequantized model is several times its
        # file
        out.write(header_of(part for parts in names.values() for part in parts))
        for name in track(say, f"importing {file.name}, once", tensors, len(tensors)):
            heads = rotated.get(name.split(".")[2], 0) if name.startswith("blk.") else 0
            try:
                offset = -1.0 if is_gemma and name.endswith("norm.weight") else 0.0
                part, *place = header["places"][name]
                _copy(opened[part], out, (place[0], place[1]), *tensors[name], heads, offset)
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(f"{file.name}: {name}: {error}") from error


def _copy(
    source: BinaryIO,
    out: BinaryIO,
    span: tuple[int, int],
    kind: str,
    shape: tuple[int, ...],
    heads: int,
    offset: float,
) -> None:
    """Copy a tensor as float32, in chunks; with `heads`, whole, with RoPE halves reordered as in checkpoints. `offset`
    is added: Gemma's checkpoints store norm weights minus 1."""
    start, end = span
    rows = math.prod(shape[:-1])
    row_bytes = (end - start) // rows
    step = end - start if heads else max(1, _CHUNK // row_bytes) * row_bytes
    source.seek(start)
    for at in range(start, end, step):
        values = decode(kind, source.read(min(step, end - at)), row_bytes)
        if heads:
            values = _unpermute(values.reshape(shape), heads)
        if offset:
            values = values + np.float32(offset)
        out.write(np.ascontiguousarray(values, "<f4").data)


def decode(kind: str, data: bytes, row_bytes: int) -> Floats:
    """Return the exact float32 values of whole rows. Raises `ValueError` or `NotImplementedError`."""
    try:
        return np.frombuffer(_rust.decode_blocks(kind, data), "<f4")
    except ValueError:
        need(f"tensors of the type {kind}: reading them", "gguf")
        import gguf  # slower, but supports types that few models have

        rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes)
        return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]), np.float32)


def _names(
    name: str, shape: tuple[int, ...], layer_names: Mapping[str, str], file_name: str
) -> list[tuple[str, tuple[int, ...]]]:
    """Return a checkpoint's names and shapes for a GGUF tensor, or for the expert tensors that it stacks:
    blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name in _GLOBAL_NAMES:
        return [(_GLOBAL_NAMES[name], shape)]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk":
        layer = f"model.layers.{parts[1]}"
        if parts[2] in layer_names:
            return [(f"{layer}.{layer_names[parts[2]]}.{parts[3]}", shape)]
        if parts[2] in _EXPERT_NAMES and len(shape) == _EXPERTS_DIMS:
            own = f"{_EXPERT_NAMES[parts[2]]}.{parts[3]}"
            return [(f"{layer}.mlp.experts.{i}.{own}", shape[1:]) for i in range(shape[0])]
    raise ConfigError(f"{file_name}: unknown tensor {name}")


def _unpermute(values: Floats, heads: int) -> Floats:
    """Reorder rows of a weight or bias: llama.cpp interleaves the two RoPE halves of each head, checkpoints do not."""
    if len(values) % (2 * heads):
        raise ValueError(f"{len(values)} rows are not {heads} heads")
    apart: Floats = values.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2)
    return apart.reshape(values.shape)
