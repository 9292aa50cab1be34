"""Metadata of a model, read from its files, by the names of GGUF, which Ollama's clients show."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.extension import _rust, why_missing

Metadata = Mapping[str, Any]
NOT_SHOWN = ("tokenizer.chat_template", "tokenizer.ggml.")
"""Prefixes of GGUF keys that are left out, because they are shown elsewhere or are long."""
BY_NAME = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
"""Fields of config.json, and their GGUF keys without the architecture."""
_MAX_HEADER_BYTES = 100 << 20


def described(config: Metadata, files: Sequence[Path], name: str) -> dict[str, Any]:
    """Return the metadata of the model with this `config` and these weight files. The parameter count is left out for
    packed quantized weights, where it is not known."""
    if len(files) == 1 and files[0].suffix == ".gguf" and not why_missing():
        return dict(_of_gguf(files[0], *_stamp(files[0])))
    family = str(config.get("model_type", "")) or "unknown"
    metadata: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    own = {**config, **(inner if isinstance(inner := config.get("text_config"), dict) else {})}
    for given, known in BY_NAME.items():
        if isinstance(value := own.get(given), int | float):
            metadata[f"{family}.{known}"] = value
    is_packed = "quantization_config" in config
    if count := 0 if is_packed else sum(_num_parameters(file, *_stamp(file)) for file in files):
        metadata["general.parameter_count"] = count
    return metadata


def parameter_size(metadata: Metadata) -> str:
    """Return the parameter count as Ollama writes it, such as "134.52M"; empty if it is not known."""
    count = metadata.get("general.parameter_count", 0)
    for least, letter, digits in ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= least:
            return f"{count / least:.{digits}f}{letter}"
    return str(count or "")


def _stamp(file: Path) -> tuple[int, int]:
    """Return modification time and size, a cache key for a file's content."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=16)
def _of_gguf(file: Path, *stamp: int) -> Metadata:
    try:
        header = _rust.gguf_header(file)
    except ValueError:
        return {}
    count = sum(math.prod(shape) for _, shape in header["tensors"].values())
    shown = {
        key: None if isinstance(value, list) else value
        for key, value in header["metadata"].items()
        if not key.startswith(NOT_SHOWN)
    }
    return {"general.parameter_count": count, **shown}


@functools.lru_cache(maxsize=256)
def _num_parameters(file: Path, *stamp: int) -> int:
    """Count the parameters of a safetensors file by its header; 0 if it has no valid header."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size)) if size <= _MAX_HEADER_BYTES else {}
        return sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return 0
