"""Files that llama.cpp's converter writes, served by llama.cpp and by us."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import _rust, envs
from minisgl.llm import LLM
from minisgl.models.architectures import ARCHITECTURES, ENCODERS
from minisgl.weights.gguf_config import READERS, Fields
from tests.helpers import our_models
from tests.helpers.gguf_rows import PLAIN, ROWS, SIZES
from tests.helpers.llama_cpp import (
    MIXTURES,
    assert_answers_alike,
    compared,
    converted,
    llama_cpp,
    our_steps,
    put_tokenizer,
    requantized,
)
from tests.helpers.models import published, save, tiny_model
from tests.helpers.variants import MODELS

WITHIN = {"f16": 0.02, "Q8_0": 0.1, "Q4_K_M": 0.2}
"""Of a log probability. llama.cpp rounds what it multiplies with such weights to 16 bits, and to 8: our engine with
`activations` int8 is as far from itself."""
Tensors = dict[str, torch.Tensor]


def _norms_stacked(tensors: Tensors) -> None:
    """The converter loses StableLM's norms of single heads; stacked, as it would write them, it keeps them."""
    heads = sorted(
        (found[1], int(found[2]), name) for name in tensors if (found := re.match(r"(.+)\.norms\.(\d+)\.weight", name))
    )
    for merged, group in itertools.groupby(heads, lambda head: head[0]):
        tensors[f"{merged}.weight"] = torch.stack([tensors.pop(name) for _, _, name in group])


def _qkv_fused(tensors: Tensors) -> None:
    """As files of ChatGLM have it."""
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)


def _predicting(tensors: Tensors) -> None:
    """With a layer behind the last that predicts a further token, as published, made of another one."""
    layers = [name.removeprefix("model.layers.").split(".", 1) for name in tensors if name.startswith("model.layers.")]
    last = max(layer for layer, _ in layers)
    for name in [name for layer, name in layers if layer == last]:
        tensors[f"mtp.layers.0.{name}"] = tensors[f"model.layers.{last}.{name}"].clone()
    norm = tensors["model.norm.weight"]
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = norm.clone()
    tensors["mtp.fc.weight"] = torch.ones(len(norm), 2 * len(norm))


REWRITES = {"norms_stacked": _norms_stacked, "qkv_fused": _qkv_fused, "predicting": _predicting}


def test_every_architecture_has_a_row() -> None:
    """A new row is measured and shown by `python -m tests.helpers.our_models ROW`."""
    figures = our_models.recorded()
    assert {name for name, one in READERS.items() if not one.encoder} == {
        row["file"] for row in figures["gguf"].values()
    }
    assert {name: row.variant for name, row in ROWS.items()} == {
        name: row["variant"] for name, row in figures["gguf"].items()
    }
    for name, row in ROWS.items():
        assert list(figures["gguf"][name]["types"]) == (["MXFP4"] if row.packed else list(WITHIN)), name


def test_the_page_says_what_was_seen() -> None:
    """After a change: `python -m tests.helpers.our_models`."""
    figures, page = our_models.recorded(), our_models.PAGE.read_text(encoding="utf-8")
    assert {one.architecture for one in MODELS.values() if one.called} == set(ARCHITECTURES) - set(ENCODERS)
    assert our_models.written(page, figures) == page


def seen_of(name: str, folder: Path) -> dict[str, Any]:
    """What is seen of a row, beside llama.cpp; asserted. Files are written to `folder`."""
    row, checkpoint = ROWS[name], folder / "checkpoint"
    checkpoint.mkdir()
    size = put_tokenizer(checkpoint, row.tokenizer)
    sizes = {name: value for name, value in SIZES.items() if name not in row.without}
    model = tiny_model(row.variant, **{"vocab_size": size, **sizes, **row.changes})
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("norm.weight"):
                weight.sub_(row.norms_less)  # sharp attention makes much of what is rounded
    published(model, checkpoint) if row.packed else save(model, checkpoint)
    said = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")) | row.said
    said = {key: value for key, value in said.items() if value is not None or key not in row.said}
    (checkpoint / "config.json").write_text(json.dumps(said), encoding="utf-8")
    if row.rewrite:
        REWRITES[row.rewrite](tensors := load_file(checkpoint / "model.safetensors"))
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    file = converted(checkpoint, "f16", row.tokenizer, *row.options)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, size, length).tolist() for length in (1, 7, 40, 90)]
    found = dict[str, float]()
    for kind, within in ({"MXFP4": WITHIN["f16"]} if row.packed else WITHIN).items():
        one = file if kind in ("f16", "MXFP4") else requantized(file, f"mostly {kind}")
        settings: dict[str, Any] = {"within": within, "tie_within": within}
        if row.decoded:
            settings = {"theirs": requantized(one, "F32"), "within": 0.5, "tie_within": 0.2, "typical": WITHIN["f16"]}
        alike = assert_answers_alike(one, prompts, num_threads=1, **settings)
        assert alike.num_steps > (20 if kind == "f16" else 8), (kind, alike)
        found[kind] = float(f"{alike.largest:.1e}")
    architecture = Fields(_rust.gguf_header(file)["metadata"]).architecture
    return {"variant": row.variant, "file": architecture, "types": found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_what_the_converter_writes_is_served_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the quantizer makes of it."""
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    seen_of(name, tmp_path)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A file whose matrices blocks of 256 fit, and the size of its vocabulary. (No experts: which are chosen hangs on
    roundings that differ.)"""
    folder = tmp_path_factory.mktemp("full")
    size = put_tokenizer(folder, "qwen2")
    model = tiny_model("qwen3-untied", vocab_size=size, **{**PLAIN, **SIZES, "num_key_value_heads": 2})
    return converted(save(model, folder), "f32", "qwen2"), size


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*_rust.GGUF_TYPES, *MIXTURES])
def test_what_the_quantizer_writes_is_served_alike(
    kind: str, full: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same file, where llama.cpp rounds activations to 8 bits; and beside that file as it decodes it."""
    monkeypatch.setenv(envs.CACHE, str(tmp_path))
    file = requantized(full[0], kind)
    tensors = _rust.gguf_header(file)["tensors"].items()
    types = {found for _, (found, shape) in tensors if len(shape) > 1}
    assert len(types) > 1 if kind in MIXTURES else types == {kind}, types
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, full[1], length).tolist() for length in (1, 7, 40)]
    with LLM(str(file), engine="cpu", log_level="error", max_seq_len=256) as llm:
        ours = our_steps(llm, prompts, 16)
    for served, within in ((file, 0.15), (requantized(file, "F32"), 0.01)):
        with llama_cpp(served, length=256) as server:
            theirs = [server.steps(prompt, 16) for prompt in prompts]
        found = compared(theirs, ours, num_top=5, tie_within=within)
        assert found.largest <= within, found
        assert found.num_steps > 5, found
