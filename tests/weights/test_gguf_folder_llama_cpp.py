"""Files that llama.cpp's converter writes, served by llama.cpp and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from minisgl import _rust, envs
from minisgl.llm import LLM
from minisgl.weights.gguf_config import ARCHITECTURES
from tests.helpers.llama_cpp import (
    MIXTURES,
    SENTENCEPIECE,
    assert_answers_alike,
    compared,
    converted,
    llama_cpp,
    our_steps,
    put_tokenizer,
    requantized,
)
from tests.helpers.models import VARIANTS, save, tiny_model

WITHIN = {"f16": 0.01, "q8_0": 0.05}
"""Of a log probability. llama.cpp rounds what it multiplies with weights of 8 bits to 8 bits: our engine with
`activations` int8 is as far from itself."""
_PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "intermediate_size": 128}


class Row(NamedTuple):
    """A tiny model of transformers, with numbers of rows that blocks of 32 divide."""

    variant: str
    """See `VARIANTS` of tests/helpers/models.py."""
    tokenizer: str = "gpt-2"
    """What the converter writes as `tokenizer.ggml.pre`, or `SENTENCEPIECE`."""
    changes: dict[str, Any] = {}  # noqa: RUF012
    norms_less: int = 0
    """What the model itself adds to the weights of its norms."""


ROWS = {
    "llama": Row("llama3-tied", "llama-bpe", {"intermediate_size": 128}),
    "llama-sentencepiece": Row("llama-linear-mha", SENTENCEPIECE, {"intermediate_size": 128}),
    "mistral": Row("mistral", "tekken", _PLAIN),
    "qwen2": Row("qwen2-tied", "qwen2", _PLAIN),
    "qwen3": Row("qwen3-untied", "qwen2", {**_PLAIN, "head_dim": 32}),
    "qwen3-moe": Row("qwen3-moe", "qwen2", {**_PLAIN, "moe_intermediate_size": 32}),
    "smollm3": Row("smollm3-tied", "smollm", {**_PLAIN, "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
    "gemma3": Row(
        "gemma3-tied",
        SENTENCEPIECE,
        {
            "intermediate_size": 128,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        norms_less=1,
    ),
}


def test_every_architecture_has_a_row() -> None:
    assert set(ARCHITECTURES.values()) <= {VARIANTS[row.variant][0] for row in ROWS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ROWS)
def test_what_the_converter_writes_is_served_alike(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    row, folder = ROWS[name], tmp_path / "checkpoint"
    folder.mkdir()
    size = put_tokenizer(folder, row.tokenizer)
    model = tiny_model(row.variant, vocab_size=size, **{"initializer_range": 0.05, **row.changes})
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("norm.weight"):
                weight.sub_(row.norms_less)  # sharp attention makes much of what is rounded
    file = converted(save(model, folder), kind, row.tokenizer)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, size, length).tolist() for length in (1, 7, 40, 90)]
    found = assert_answers_alike(file, prompts, within=WITHIN[kind], tie_within=WITHIN[kind])
    assert found.num_steps > 20, found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A file whose matrices blocks of 256 fit, and the size of its vocabulary. (No experts: which are chosen hangs on
    roundings that differ.)"""
    folder = tmp_path_factory.mktemp("full")
    size = put_tokenizer(folder, "qwen2")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    model = tiny_model("qwen3-untied", vocab_size=size, initializer_range=0.05, **{**_PLAIN, **sizes})
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
