"""The embedded model, imported from its package by the code under test, against transformers in float32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from minisgl import envs
from minisgl.bench.prompts import mt_bench
from minisgl.models import load_config
from minisgl.models.decoder import Decoder
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.gguf_import import import_gguf
from minisgl.weights.sources import find_smollm2
from tests.helpers.meaning import BEGINNINGS, CAPITALS, FRANCE, MARGIN, MAX_TOKENS, capital
from tests.helpers.models import DenseSequence, assert_greedy, greedy, load, reference_logits

PROMPTS = (
    FRANCE,
    "List the first 12 prime numbers, then add 1234 and 5678.",
    "Écris une phrase sur la mer, puis une en 日本語 🌊.",
    "Write a Python function that reverses a string.\n\n    def f(x):\n",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(envs.CACHE, str(cache))
        yield import_gguf(find_smollm2(), lambda *_: None)
    shutil.rmtree(cache)  # half a gigabyte


@pytest.fixture(scope="module")
def ours(folder: Path) -> Decoder:
    return load(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return [int(i) for i in tokenizer.encode(prompt, add_special_tokens=False)]


def test_smollm2_config_is_read_from_metadata(folder: Path) -> None:
    config = load_config(folder)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.max_position, config.tie_word_embeddings, config.dtype) == (8192, True, "bfloat16")


def test_smollm2_tokenizer_round_trips_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").tolist()[0] == 1
    assert tokenizer.decode([1, 2]) == ""
    ids = tokenizer.encode("pay 1234 now").tolist()
    assert [tokenizer.decode([i]) for i in ids] == ["pay", " ", "1", "2", "3", "4", " now"]
    for text in PROMPTS:
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def _answer(model: Decoder, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The most likely tokens up to the end or `count`, and the least distance of one to the next likeliest."""
    sequence, found, least = DenseSequence(model), list[int](), float("inf")
    logits = sequence.extend(prompt)[-1]
    while len(found) < count:
        best = logits.topk(2)
        least = min(least, float(best.values[0] - best.values[1]))
        if int(best.indices[0]) in model.config.eos_ids:
            break
        found.append(int(best.indices[0]))
        logits = sequence.extend(found[-1:])[-1]
    return found, least


@pytest.mark.any_cpu
@pytest.mark.parametrize("country", CAPITALS)
def test_it_is_sure_of_what_tests_ask(country: str, ours: Decoder, tokenizer: Tokenizer) -> None:
    tokens, least = _answer(ours, _chat(tokenizer, capital(country)), MAX_TOKENS)
    assert CAPITALS[country] in tokenizer.decode(tokens) and len(tokens) < MAX_TOKENS
    assert least > MARGIN, f"{least:.2f} between the likeliest two"


@pytest.mark.any_cpu
@pytest.mark.parametrize("text", BEGINNINGS)
def test_it_is_sure_of_how_texts_go_on(text: str, ours: Decoder, tokenizer: Tokenizer) -> None:
    expected, count = BEGINNINGS[text]
    tokens, least = _answer(ours, [int(i) for i in tokenizer.encode(text)], count)
    assert tokenizer.decode(tokens).startswith(expected)
    assert least > MARGIN, f"{least:.2f} between the likeliest two"


@pytest.mark.parametrize("text", PROMPTS)
def test_greedy_tokens_equal_transformers(text: str, ours: Decoder, reference: Any, tokenizer: Tokenizer) -> None:
    prompt = _chat(tokenizer, text)
    assert_greedy(reference, prompt, greedy(ours, prompt, 12))


@pytest.mark.slow
def test_logits_equal_transformers_on_mt_bench(ours: Decoder, reference: Any, tokenizer: Tokenizer) -> None:
    if envs.data_dir() is None:
        pytest.skip(f"{envs.DATA} is not set")
    for text, _ in mt_bench()[::4]:
        ids, sequence = _chat(tokenizer, text), DenseSequence(ours)
        logits = [sequence.extend(ids)]
        for _ in range(8):
            ids.append(int(logits[-1][-1].argmax()))
            logits.append(sequence.extend(ids[-1:]))
        torch.testing.assert_close(torch.cat(logits), reference_logits(reference, ids), rtol=1e-5, atol=2e-4)


@pytest.mark.slow
def test_the_import_equals_that_of_transformers(folder: Path) -> None:
    """By the part of transformers that reads the file: its models load what it read through accelerate."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = find_smollm2()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=empty)["tensors"]
    with safe_open(folder / "model.safetensors", "pt") as imported:
        names = set(imported.keys())
        assert names == theirs.keys() - {"lm_head.weight"}
        for name in names:
            assert torch.equal(imported.get_tensor(name), theirs[name]), name


@pytest.mark.slow
def test_long_context_logits_equal_transformers(ours: Decoder, reference: Any) -> None:
    ids = torch.randint(20, 49_000, (1500,), generator=torch.Generator().manual_seed(1)).tolist()
    sequence = DenseSequence(ours)
    logits = torch.cat([sequence.extend(ids[at : at + 500])[-20:] for at in (0, 500, 1000)])
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        expected = reference.lm_head(torch.cat([hidden[at + 480 : at + 500] for at in (0, 500, 1000)]))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-4)
