"""Models of well-known shapes with random weights, as GGUF files: speed depends on shapes and types, not on values.

    file = random_model("qwen2.5-1.5b", "q4_k_m", layers=None)     # written once, into the cache

Invariants: llama.cpp can read the file too; the same name gives the same bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.weights.sources import find_smollm2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a published config.json."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int
    theta: float = 1e6
    tied: bool = False
    experts: int = 0
    per_token: int = 0
    expert_inner: int = 0
    window: int = 0
    attending: tuple[int, ...] | None = None
    """Layers with attention; None: all. The others have a recurrent state."""
    state_heads: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of all tensors, rows first."""
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield ("token_embd_norm.weight" if self.arch == "lfm2" else "output_norm.weight"), (self.hidden,)
        if not self.tied:
            yield "output.weight", (self.vocab, self.hidden)
        layer = self._layer()
        mixing = {
            name: sizes for name, sizes in layer.items() if not name.startswith("attn_") or name == "attn_norm.weight"
        }
        mixing |= self._mixing()
        for i in range(self.layers):
            own = layer if self.attending is None or i in self.attending else mixing
            yield from ((f"blk.{i}.{name}", shape) for name, shape in own.items())

    def _mixing(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors that a layer with a recurrent state has in place of attention."""
        inner, heads, hidden = self.state_heads * _STATE_DIM, self.state_heads, self.hidden
        if self.arch == "lfm2":
            wide, square = (3 * hidden, hidden), (hidden, hidden)
            parts = {"in_proj": wide, "conv": (hidden, _TAPS[self.arch]), "out_proj": square}
            return {f"shortconv.{name}.weight": shape for name, shape in parts.items()}
        return {
            "attn_qkv.weight": (3 * inner, hidden),
            "attn_gate.weight": (inner, hidden),
            "ssm_conv1d.weight": (3 * inner, _TAPS["qwen35"]),
            "ssm_dt.bias": (heads,),
            "ssm_a": (heads,),
            "ssm_beta.weight": (heads, hidden),
            "ssm_alpha.weight": (heads, hidden),
            "ssm_norm.weight": (_STATE_DIM,),
            "ssm_out.weight": (hidden, inner),
        }

    def _layer(self) -> dict[str, tuple[int, ...]]:
        queries, keys, inner = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.expert_inner or self.inner,
        )
        of_experts = (self.experts,) if self.experts else ()
        end = "_exps" if self.experts else ""
        sizes: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, queries),
            "post_attention_norm" if self.arch in ("gpt-oss", "qwen35") else "ffn_norm": (self.hidden,),
            f"ffn_gate{end}": (*of_experts, inner, self.hidden),
            f"ffn_up{end}": (*of_experts, inner, self.hidden),
            f"ffn_down{end}": (*of_experts, self.hidden, inner),
        }
        if self.experts:
            sizes["ffn_gate_inp"] = (self.experts, self.hidden)
        if self.arch == "qwen35":  # its queries have gates
            sizes["attn_q"] = (2 * queries, self.hidden)
        if self.arch.startswith(("qwen3", "gemma3", "lfm2")):
            sizes |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
        if self.arch == "gemma3":
            sizes |= {"post_attention_norm": (self.hidden,), "post_ffw_norm": (self.hidden,)}
        with_bias = {
            "qwen2": ("attn_q", "attn_k", "attn_v"),
            "gpt-oss": [name for name, shape in sizes.items() if len(shape) > 1],
        }
        tensors = {f"{name}.weight": shape for name, shape in sizes.items()}
        tensors |= {f"{name}.bias": sizes[name][:-1] for name in with_bias.get(self.arch, ())}
        return tensors | ({"attn_sinks.weight": (self.heads,)} if self.arch == "gpt-oss" else {})


_STATE_DIM = 128
_TAPS = {"lfm2": 3, "qwen35": 4}
SHAPES = {
    "qwen3-0.6b": Shape(
        arch="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, inner=3072, vocab=151_936,
        context=40_960, tied=True,
    ),
    "qwen2.5-1.5b": Shape(
        arch="qwen2", layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, inner=8960, vocab=151_936,
        context=32_768, tied=True,
    ),
    "smollm2-1.7b": Shape(
        arch="llama", layers=24, hidden=2048, heads=32, kv_heads=32, head_dim=64, inner=8192, vocab=49_152,
        context=8192, theta=1.3e5, tied=True,
    ),
    "llama-3.2-3b": Shape(
        arch="llama", layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, inner=8192, vocab=128_256,
        context=131_072, theta=5e5, tied=True,
    ),
    "gemma-3-4b": Shape(
        arch="gemma3", layers=34, hidden=2560, heads=8, kv_heads=4, head_dim=256, inner=10_240, vocab=262_208,
        context=131_072, tied=True, window=1024,
    ),
    "qwen3.5-0.8b": Shape(
        arch="qwen35", layers=24, hidden=1024, heads=8, kv_heads=2, head_dim=256, inner=3584, vocab=248_320,
        context=262_144, theta=1e7, tied=True, attending=(3, 7, 11, 15, 19, 23), state_heads=16,
    ),
    "lfm2-1.2b": Shape(
        arch="lfm2", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192, vocab=65_536,
        context=128_000, tied=True, attending=(2, 5, 8, 10, 12, 14),
    ),
    "qwen3-4b": Shape(
        arch="qwen3", layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, inner=9728, vocab=151_936,
        context=40_960, tied=True,
    ),
    "qwen3-30b-a3b": Shape(
        arch="qwen3moe", layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, inner=6144, vocab=151_936,
        context=40_960, experts=128, per_token=8, expert_inner=768,
    ),
    "gpt-oss-20b": Shape(
        arch="gpt-oss", layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64, inner=2880, vocab=201_088,
        context=131_072, theta=1.5e5, experts=32, per_token=4, expert_inner=2880, window=128,
    ),
}  # fmt: skip

MIXTURES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k"), "mxfp4": ("q8_0", "mxfp4")}
"""llama.cpp's mixtures: the type of most matrices; the finer type of the LM head, of V and of half of the down
projections (mxfp4: of the experts)."""
TYPES = ("q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "q8_0", "bf16", *MIXTURES)

# By type: offsets of a block's 16-bit scales, and values that make random weights of about 0.02.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "q4_0": ((0, 0.0043),),
    "q4_1": ((0, 0.0043), (2, -0.032)),
    "q4_k": ((0, 1.4e-4), (2, 1.05e-3)),
    "q5_k": ((0, 7e-5), (2, 1.08e-3)),
    "q6_k": ((208, 1.5e-5),),
    "q8_0": ((0, 2.7e-4),),
}


def random_model(name: str, kind: str, layers: int | None = None, folder: Path | None = None) -> Path:
    """Return the file of a model with the shape `name` of `SHAPES`, at most `layers` layers and the type `kind` of
    `TYPES`. It is written if it does not exist. Raises `ConfigError`."""
    shape = SHAPES[name] if layers is None else replace(SHAPES[name], layers=min(layers, SHAPES[name].layers))
    folder = envs.cache_dir() / "random" if folder is None else folder
    path = folder / f"{name}-{shape.layers}-layers-{kind}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{np.random.default_rng().integers(1 << 62):x}.part")
        try:
            write_random(part, shape, kind)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def write_random(path: Path, shape: Shape, kind: str) -> None:
    """Write a model with random weights to `path`. Raises `ConfigError` without the package gguf."""
    gguf = _gguf()
    with contextlib.closing(gguf.GGUFWriter(path, shape.arch, use_temp_file=True)) as writer:
        _add_numbers(gguf, writer, shape)
        _add_tokenizer(gguf, writer, shape.vocab)
        rng = np.random.default_rng(0)
        for name, sizes in shape.tensors():
            if len(sizes) == 1 or name.endswith(".bias"):
                writer.add_tensor(name, np.full(sizes, _value_of(name), np.float32))
            elif re.search(r"gate_inp|conv1d|\.conv\.", name):
                writer.add_tensor(name, rng.standard_normal(sizes, np.float32) * np.float32(0.02))
            else:
                own = gguf.GGMLQuantizationType[type_of(name, kind).upper()]
                writer.add_tensor(name, random_blocks(own, sizes, rng), raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _value_of(name: str) -> float:
    """Return the value that fills a vector; with these values, states fade."""
    return 1.0 if "norm" in name else -1.0 if name.endswith("ssm_a") else 0.0


def type_of(name: str, kind: str) -> str:
    """Return the type of a matrix. llama.cpp gives finer types to half of the layers; here it is every other one."""
    most, finer = MIXTURES.get(kind, (kind, kind))
    if kind == "mxfp4":
        return finer if "_exps" in name else most
    every_other = name.startswith("blk.") and int(name.split(".")[1]) % 2 == 0
    head = name in ("token_embd.weight", "output.weight")
    return finer if head or (every_other and ("attn_v" in name or "ffn_down" in name)) else most


def random_blocks(kind: Any, sizes: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return random weights of type `kind`, [..., bytes of a row]. Experts have the same rows in other orders."""
    gguf = _gguf()
    rows, columns = sizes[-2:]
    if kind == gguf.GGMLQuantizationType.BF16:
        blocks = gguf.quantize(rng.standard_normal((rows, columns), np.float32) * np.float32(0.02), kind)
    else:
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows, columns // numbers, size), np.uint8)
        if kind == gguf.GGMLQuantizationType.MXFP4:
            blocks[..., 0] = 120  # 2 ** -7
        for at, scale in _SCALES.get(kind.name.lower(), ()):
            blocks[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        blocks = blocks.reshape(rows, -1)
    if len(sizes) == 3:
        blocks = np.stack([np.roll(blocks, expert, axis=0) for expert in range(sizes[0])])
    return np.asarray(blocks)


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("--model-config: needs the package gguf, to write a file: pip install gguf") from error
    module: ModuleType = gguf
    return module


def _add_numbers(gguf: Any, writer: Any, shape: Shape) -> None:
    writer.add_name("random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    if shape.arch == "lfm2":
        writer.add_head_count_kv([shape.kv_heads * (i in (shape.attending or ())) for i in range(shape.layers)])
        writer.add_shortconv_l_cache(_TAPS[shape.arch])
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.per_token)
        writer.add_expert_feed_forward_length(shape.expert_inner)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.arch == "qwen35":
        writer.add_ssm_conv_kernel(_TAPS[shape.arch])
        writer.add_ssm_state_size(_STATE_DIM)
        writer.add_ssm_group_count(shape.state_heads)
        writer.add_ssm_time_step_rank(shape.state_heads)
        writer.add_ssm_inner_size(shape.state_heads * _STATE_DIM)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(shape.head_dim // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if shape.arch == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)


def _add_tokenizer(gguf: Any, writer: Any, vocab: int) -> None:
    """Add the embedded model's tokenizer, with made-up tokens up to the vocabulary's size."""
    fields = _rust.gguf_header(find_smollm2())["metadata"]

    def own(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"]

    tokens, kinds = list(own("tokens")), list(own("token_type"))
    more = range(vocab - len(tokens))
    writer.add_tokenizer_model(own("model"))
    writer.add_tokenizer_pre(own("pre"))
    writer.add_token_list([*tokens, *(f"<made-up-{i}>" for i in more)])
    writer.add_token_types([*kinds, *[int(gguf.TokenType.UNUSED)] * len(more)])
    writer.add_token_merges(own("merges"))
    writer.add_bos_token_id(int(own("bos_token_id")))
    writer.add_eos_token_id(int(own("eos_token_id")))
