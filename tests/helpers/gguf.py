"""GGUF files of tiny models, laid out like those of llama.cpp's converter.

The file has the exact weights of the model, or ggml's quantization of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from minisgl import _rust
from tests.helpers.models import tiny_model

# no merge leads to "xyz"
TOKENS = [*sorted(ByteLevel.alphabet()), "Ġ4", "42", "xyz", "<|start|>", "<tool>"]
START, TOOL = len(TOKENS) - 2, len(TOKENS) - 1
Edit = Callable[[GGUFWriter], None]
Floats = npt.NDArray[np.float32]
name_map = cache(gguf.get_tensor_name_map)  # 50 ms each
# where these blocks have their scales in half precision, and values for them that make weights of usual size
_SCALES = {
    GGMLQuantizationType.Q4_K: ((0, 3e-4), (2, 2.2e-3)),
    GGMLQuantizationType.Q5_K: ((0, 1.5e-4), (2, 2.2e-3)),
    GGMLQuantizationType.Q6_K: ((208, 6e-5),),
    GGMLQuantizationType.Q2_K: ((80, 2e-3), (82, 2e-3)),
    GGMLQuantizationType.Q3_K: ((108, 6e-4),),
    GGMLQuantizationType.IQ3_S: ((0, 2e-4),),
    GGMLQuantizationType.IQ4_NL: ((0, 4e-4),),
    GGMLQuantizationType.IQ4_XS: ((0, 2e-5),),
    GGMLQuantizationType.NVFP4: ((0, 6.1274e-5), (2, 6.1274e-5)),  # its bytes are four scales of 8 bits
    GGMLQuantizationType.Q1_0: ((0, 0.04),),
}


def _interleave(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder each head's rows 0, 1, .. h, h + 1, .. to 0, h, 1, h + 1, .., llama.cpp's order for RoPE."""
    size = len(values) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return values[order]


def tensors_of(model: Any, arch: str) -> dict[str, Floats]:
    """Return the model's weights by their GGUF names, in GGUF's order of rows and experts."""
    config, out = model.config, dict[str, Floats]()
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    # some name maps of gguf-py lack tensors of their architecture: Llama's names are used for those
    lists = [name_map(one, config.num_hidden_layers) for one in (kind, gguf.MODEL_ARCH.LLAMA)]
    experts: dict[str, list[Floats]] = {}
    for name, values in model.state_dict().items():
        array: Floats = values.float().numpy()
        layer, _, own = name.partition(".mlp.experts.")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if own:  # transformers 5 has all experts in two tensors, 4 each of them by itself
            block = f"blk.{layer.split('.')[2]}"
            if own == "gate_up_proj":
                out[f"{block}.ffn_gate_exps.weight"], out[f"{block}.ffn_up_exps.weight"] = np.split(array, 2, axis=1)
            elif own == "down_proj":
                out[f"{block}.ffn_down_exps.weight"] = array
            else:
                experts.setdefault(f"{block}.ffn_{own.split('.')[1][:-5]}_exps.weight", []).append(array)
            continue
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        if arch in ("llama", "smollm3") and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = _interleave(array, heads)
        out[next(filter(None, (names.get_name(name, (".weight", ".bias")) for names in lists)))] = array
    return out | {name: np.stack(parts) for name, parts in experts.items()}


def quantized(values: Floats, kind: GGMLQuantizationType, seed: int = 0) -> npt.NDArray[Any]:
    """Return the quantized blocks of `values`; random ones of similar size for types that gguf-py cannot quantize."""
    if kind not in _SCALES:
        return gguf.quantize(values, kind)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (values.size // length, size), np.uint8)
    for at, scale in _SCALES[kind]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def numbers_of(file: Path) -> dict[str, Floats]:
    """Return the file's tensors, dequantized by gguf-py."""
    tensors = gguf.GGUFReader(file).tensors
    return {
        tensor.name: np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            tensor.shape[::-1].tolist()
        )
        for tensor in tensors
    }


def _rope_factors(rope: dict[str, Any], head_dim: int) -> Floats:
    """Return the RoPE factors that llama.cpp's converter computes from Llama 3.1's scaling."""
    factors, theta = [], rope["rope_theta"]
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wave = 2 * np.pi / frequency
        smooth = (original / wave - low) / (high - low)
        blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wave < original / high else rope["factor"] if wave > original / low else blended)
    return np.array(factors, np.float32)


def add_sizes(writer: GGUFWriter, config: Any, num_mtp: int = 0) -> int:
    """Add the sizes of a transformers `config`, with `num_mtp` layers more, and return the size of a head."""
    writer.add_block_count(config.num_hidden_layers + num_mtp)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    return head_dim


def add_vocabulary(writer: GGUFWriter, kind: str = "gpt2", pre: str = "smollm") -> None:
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 4])
    writer.add_token_merges(["Ġ 4", "4 2"])
    writer.add_eos_token_id(START)
    writer.add_chat_template("{{ messages[0].content }}")


def write_gguf(
    file: Path,
    model: Any,
    arch: str = "llama",
    *,
    pre: str = "smollm",
    kind: str = "gpt2",
    quantise: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Edit | None = None,
    tensors_a_part: int = 0,
    decoded: bool = False,
) -> Path:
    """Write a transformers `model` with the vocabulary `TOKENS` as a GGUF file; matrices, except routers, are stored as
    `quantise`. `tensors_a_part`: split into files and return the first. `decoded`: store `quantise`'s values as F32."""
    config = model.config
    writer = GGUFWriter(file, arch, split_max_tensors=tensors_a_part)
    head_dim = add_sizes(writer, config)
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_float32(f"{arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(rope, head_dim))
    if rope["rope_type"] == "linear" and arch == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch in ("llama", "gemma3") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_vocabulary(writer, kind, pre)
    for seed, (name, array) in enumerate(tensors_of(model, arch).items()):
        stored = quantise if array.ndim > 1 and "ffn_gate_inp" not in name else GGMLQuantizationType.F32
        data = quantized(array, stored, seed)
        if decoded:
            data = np.frombuffer(_rust.decode_blocks(stored.name, data.tobytes()), np.float32).reshape(array.shape)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.F32 if decoded else stored)
    finish(writer, file, edit)
    return next(file.parent.glob(f"{file.stem}-00001-of-*.gguf")) if tensors_a_part else file


def finish(writer: GGUFWriter, file: Path, edit: Edit | None = None) -> Path:
    """Write what `writer` has, after `edit`, and return the file."""
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def quiet(text: str, done: int = 0, total: int = 0) -> None:
    """Ignore reports of progress."""


def written_model(variant: str, **changes: Any) -> Any:
    """Return a tiny model limited to features that a GGUF file can store."""
    plain: dict[str, Any] = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "intermediate_size": 128,
    }
    if "gemma3" in variant:
        local = {"rope_type": "default", "rope_theta": 300.0}
        # no key says which layers attend to all tokens: each sixth does
        plain |= {"rope_parameters": {"full_attention": plain["rope_parameters"], "sliding_attention": local}}
        plain |= {"layer_types": (["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"])}
        plain |= {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "head_dim": 16}
    if "smollm3" in variant:
        plain |= {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}
    if "moe" in variant:
        plain["moe_intermediate_size"] = 32
    no_bias = {"attention_bias": False, "mlp_bias": False}
    return tiny_model(variant, vocab_size=len(TOKENS), **{**no_bias, **plain, **changes})
