"""Import of a GGUF file: once per file it becomes a folder of safetensors, config.json and tokenizer.json.

Keeps true: the folder appears whole or not at all; it is keyed by the file's content; dequantised values are exact
(float32). What this cannot import is refused by name.
Doesn't know: how models compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.made_once import made_once
from minisgl.progress import Report, track
from minisgl.weights.gguf_tokenizer import tokenizer_files

FORMAT = "2"  # part of the key: a change of what is written makes new folders
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def import_gguf(file: Path, say: Report) -> Path:
    """The folder for `file`, made now if it is not there. Raises `ConfigError`."""
    name = f"{_digest(file)[:32]}-{FORMAT}"
    return made_once(envs.cache_dir() / "gguf" / name, lambda partial: _write(file, partial, say))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(file: Path, folder: Path, say: Report) -> None:
    try:
        reader = GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise ConfigError(f"{file.name}: not a GGUF file: {error}") from error
    fields = _Fields(reader, file.name)
    config = _config(fields, {tensor.name for tensor in reader.tensors})
    text_files = {
        "config.json": config,
        "generation_config.json": {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config},
        **tokenizer_files(fields.get),
    }
    for name, content in text_files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    names = [_name(tensor.name, file.name) for tensor in reader.tensors]
    rotated: dict[str, int] = {}  # llama.cpp reorders the rows of these; value: heads
    if fields.architecture == "llama":
        rotated = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    with (folder / "model.safetensors").open("wb") as out:
        out.write(_header(names, reader.tensors))
        tensors = track(say, f"importing {file.name}, once", reader.tensors, len(reader.tensors))
        for name, tensor in zip(names, tensors, strict=True):
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ConfigError(f"{file.name}: {tensor.name}: {error}") from error
            if heads := rotated.get(name.split(".", 4)[-1]):
                values = _unpermute(values, heads)
            out.write(np.ascontiguousarray(values, "<f4").data)


def _header(names: Sequence[str], tensors: Sequence[ReaderTensor]) -> bytes:
    """The head of a safetensors file of float32 tensors, which follow in this order. Written by hand because the
    library wants all tensors in memory at once; a dequantised model is several times its file."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in zip(names, tensors, strict=True):
        start, end = end, end + 4 * int(tensor.n_elements)
        # ggml lists the fastest dimension first
        head[name] = {"dtype": "F32", "shape": tensor.shape[::-1].tolist(), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


class _Fields:
    """Metadata by key; `own` keys are those of the file's architecture."""

    def __init__(self, reader: GGUFReader, file_name: str) -> None:
        self._reader = reader
        self._file_name = file_name
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{file_name}: architecture {self.architecture!r} is not imported: only {known}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; without one and without a default, `ConfigError`."""
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise ConfigError(f"{self._file_name}: the GGUF metadata lacks {key}")
            return default
        return field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)


def _config(fields: _Fields, tensor_names: set[str]) -> dict[str, Any]:
    hidden, heads = int(fields.own("embedding_length")), int(fields.own("attention.head_count"))
    config = {
        "architectures": [ARCHITECTURES[fields.architecture]],
        "model_type": fields.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": int(fields.own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.own("attention.head_count_kv", heads)),
        "head_dim": int(fields.own("attention.key_length", hidden // heads)),
        "intermediate_size": int(fields.own("feed_forward_length")),
        "vocab_size": len(fields.get("tokenizer.ggml.tokens")),
        "max_position_embeddings": int(fields.own("context_length")),
        "rms_norm_eps": float(fields.own("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fields.own("rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "eos_token_id": int(fields.get("tokenizer.ggml.eos_token_id")),
        "torch_dtype": "bfloat16",
    }
    if scaling := _rope_scaling(fields):
        config["rope_scaling"] = scaling
    if (bos := int(fields.get("tokenizer.ggml.bos_token_id", -1))) >= 0:
        config["bos_token_id"] = bos
    return config


def _rope_scaling(fields: _Fields) -> dict[str, Any]:
    """As config.json says it; nothing for plain rotary embeddings."""
    kind = fields.own("rope.scaling.type", "none")
    if kind in ("none", ""):
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"GGUF: rope.scaling.type: {kind!r} is not imported: use the model's safetensors")
    factor = float(fields.own("rope.scaling.factor"))
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    for key, plain in (
        ("attn_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_log_multiplier", 0.0),
    ):
        if (value := float(fields.own(f"rope.scaling.{key}", plain))) != plain:
            raise ConfigError(f"GGUF: rope.scaling.{key}: {value:g} is not imported: use the model's safetensors")
    scaling["original_max_position_embeddings"] = int(fields.own("rope.scaling.original_context_length"))
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        scaling[name] = float(fields.own(f"rope.scaling.{key}", 0.0)) or None
    return scaling


def _name(name: str, file_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name == "rope_freqs.weight":
        raise ConfigError(f"{file_name}: scaled rotary embeddings are not imported from GGUF: use safetensors")
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(f"{file_name}: unknown tensor {name}")


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp interleaves the two halves of each rotated head; checkpoints keep them apart."""
    rows, columns = values.shape
    apart: npt.NDArray[np.float32] = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return apart.reshape(rows, columns)
