"""The models of the measurements: the embedded one, and random weights in the shapes of Qwen3-0.6B.

The random ones are GGUF files (Q4_1, Q8_0, BF16) that llama.cpp reads too: the tokenizer is the embedded model's, with
made-up tokens up to the size of the vocabulary. They are written once into a folder that the caller names.

The same weights in every type, from one seed, so far as a type can hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from minisgl.weights.sources import find_smollm2

TYPES = {
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "bf16": gguf.GGMLQuantizationType.BF16,
}
SCALE = 0.02
ROWS_AT_ONCE = 8192  # of the embedding: a whole one in float32 is 600 MB


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Qwen3 with a tied head."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 3072
    vocab: int = 151_936
    context: int = 40_960

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, rows first."""
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        for i in range(self.layers):
            sizes: dict[str, tuple[int, ...]] = {
                "attn_norm": (self.hidden,),
                "attn_q": (self.heads * self.head_dim, self.hidden),
                "attn_k": (self.kv_heads * self.head_dim, self.hidden),
                "attn_v": (self.kv_heads * self.head_dim, self.hidden),
                "attn_q_norm": (self.head_dim,),
                "attn_k_norm": (self.head_dim,),
                "attn_output": (self.hidden, self.heads * self.head_dim),
                "ffn_norm": (self.hidden,),
                "ffn_gate": (self.inner, self.hidden),
                "ffn_up": (self.inner, self.hidden),
                "ffn_down": (self.hidden, self.inner),
            }
            yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in sizes.items())


QWEN3_06B = Shape()
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, inner=96, vocab=49_408, context=2048)


def smollm2() -> Path:
    return find_smollm2()


def qwen3(kind: str, folder: Path, shape: Shape = QWEN3_06B) -> Path:
    """The file of random weights in type `kind`, made now if it is not there. It appears whole or not at all."""
    name = "qwen3-0.6b" if shape is QWEN3_06B else f"qwen3-{shape.layers}x{shape.hidden}"
    path = folder / f"{name}-random-{kind}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _write(part, TYPES[kind], shape)
        part.replace(path)
    return path


def _write(path: Path, kind: gguf.GGMLQuantizationType, shape: Shape) -> None:
    writer = gguf.GGUFWriter(path, "qwen3", use_temp_file=True)
    writer.add_name("random weights")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    _add_tokenizer(writer, shape.vocab)
    generator = np.random.default_rng(0)
    for name, sizes in shape.tensors():
        if len(sizes) == 1:
            writer.add_tensor(name, np.ones(sizes, np.float32))
        else:
            writer.add_tensor(name, _matrix(generator, sizes, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrix(
    generator: np.random.Generator, sizes: Sequence[int], kind: gguf.GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    rows, columns = sizes
    parts = []
    for first in range(0, rows, ROWS_AT_ONCE):
        values = generator.standard_normal((min(ROWS_AT_ONCE, rows - first), columns), np.float32) * SCALE
        parts.append(gguf.quantize(values, kind))
    return np.concatenate(parts)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    fields = gguf.GGUFReader(smollm2()).fields

    def own(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    tokens = list(own("tokenizer.ggml.tokens"))
    kinds = list(own("tokenizer.ggml.token_type", [1] * len(tokens)))
    writer.add_tokenizer_model(own("tokenizer.ggml.model"))
    writer.add_tokenizer_pre(own("tokenizer.ggml.pre", "default"))
    writer.add_token_list([*tokens, *(f"<made-up-{i}>" for i in range(vocab - len(tokens)))])
    writer.add_token_types([*kinds, *[int(gguf.TokenType.UNUSED)] * (vocab - len(tokens))])
    writer.add_token_merges(own("tokenizer.ggml.merges"))
    writer.add_bos_token_id(int(own("tokenizer.ggml.bos_token_id")))
    writer.add_eos_token_id(int(own("tokenizer.ggml.eos_token_id")))
