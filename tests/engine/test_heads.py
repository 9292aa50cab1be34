"""Heads behind pooled numbers, against transformers and sentence-transformers' files: scores of pairs, dense layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import ConfigError
from minisgl.sampling_params import SCORE
from tests.helpers.encoders import (
    hidden_states,
    judging,
    tiny_cross_encoder,
    tiny_encoder,
    with_dense,
)
from tests.helpers.engines import load, vectors
from tests.helpers.models import reference_logits, save, tiny_model
from tests.helpers.variants import CROSS_ENCODERS

pytestmark = pytest.mark.any_cpu

WITHIN = 1e-4
SEP = 2
DENSE = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"


def pairs() -> list[list[int]]:
    generator = np.random.default_rng(8)
    texts = [[generator.integers(6, 131, n).tolist() for n in sizes] for sizes in ((5, 30), (40, 3), (1, 1))]
    return [[3, *one, SEP, *other, SEP] for one, other in texts]


@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_cross_encoder(name)
    folder, prompts = save(model, tmp_path), pairs()
    engine, _ = load("cpu", folder, num_pages=10, num_threads=1)
    assert engine.info.kind == ("judge" if name == "qwen3-classes" else "cross_encoder")
    engine.close()
    asked = [(prompt, SCORE) for prompt in prompts]
    scores = vectors(folder, asked)
    assert all(map(torch.equal, scores, vectors(folder, asked, max_prefill_length=7)))
    for prompt, ours in zip(prompts, scores, strict=True):
        more = {}
        if name == "bert":
            second = prompt.index(SEP) + 1
            more = {"token_type_ids": torch.tensor([[0] * second + [1] * (len(prompt) - second)])}
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt]), **more).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied"])
def test_the_score_of_two_tokens_is_the_difference_of_their_logits(name: str, tmp_path: Path) -> None:
    model, (yes, no), prompts = tiny_model(name), (57, 21), pairs()
    folder = judging(save(model, tmp_path), true_token_id=yes, false_token_id=no)
    for prompt, (ours,) in zip(prompts, vectors(folder, [(one, SCORE) for one in prompts]), strict=True):
        logits = reference_logits(model, prompt)[-1]
        torch.testing.assert_close(ours, logits[yes] - logits[no], rtol=0, atol=WITHIN)
    judging(folder, true_token_id=yes, false_token_id=131)
    with pytest.raises(ConfigError, match=r"1_LogitScore/config.json: token ids \[57, 131\]: must be below 131"):
        load("cpu", folder)
    engine, _ = load("cpu", judging(folder, true_token_id=yes, false_token_id=None), num_pages=10)
    assert engine.info.kind == "decoder"  # a single token's logit is no probability
    engine.close()


def test_dense_layers_are_behind_the_pooling(tmp_path: Path) -> None:
    """As EmbeddingGemma has two, without biases."""
    model = tiny_encoder("embedding-gemma")
    one, other = with_dense(save(model, tmp_path), DENSE, (96, 40))
    prompt = list(range(6, 60))
    (ours,) = vectors(tmp_path, [(prompt, "mean")])
    theirs = other @ torch.tanh(one @ hidden_states(model, prompt).mean(0) + torch.arange(96) / 9.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=WITHIN)


def test_unsupported_heads_are_refused(tmp_path: Path) -> None:
    folder = save(tiny_encoder("bert"), tmp_path / "a")
    with_dense(folder, ("torch.nn.modules.activation.Softplus",), (8,))
    with pytest.raises(ConfigError, match=r"2_Dense/config.json: activation_function: .*Softplus is not supported"):
        load("cpu", folder)
    folder = save(tiny_encoder("bert"), tmp_path / "b")
    with_dense(folder, DENSE, (96, 40))
    save_file({"linear.weight": torch.zeros(3, 95)}, folder / "3_Dense" / "model.safetensors")
    with pytest.raises(ConfigError, match="head: a step does not fit its input of 96 elements"):
        load("cpu", folder)
    folder = save(tiny_cross_encoder("bert"), tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    del tensors["bert.pooler.dense.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor bert\.pooler\.dense\.weight"):
        load("cpu", folder)
