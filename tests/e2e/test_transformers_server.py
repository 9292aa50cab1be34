"""A server whose model is transformers' code on minisgl's attention: an architecture that is not native, found by
itself, and a real model whose answer is known."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.weights.sources import resolve_model
from tests.helpers.e2e import serving
from tests.helpers.engines import assert_greedy
from tests.helpers.meaning import CAPITALS, FRANCE, MAX_TOKENS
from tests.helpers.models import save, tiny_case
from tests.helpers.seconds import WAIT_S
from tests.helpers.variants import Model

pytestmark = pytest.mark.any_cpu


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("smollm2", lambda *report: None)


def test_an_architecture_that_is_not_native_is_served(smollm2: Path, tmp_path: Path) -> None:
    model = tiny_case(Model("OlmoForCausalLM", "", {"vocab_size": 49152}))
    folder = save(model, tmp_path)
    shutil.copy(smollm2 / "tokenizer.json", folder)
    prompts = [list(range(10 + at, 10 + at + length)) for at, length in enumerate((40, 3, 17, 33))]
    with serving("--model", str(folder), "--dtype", "float32", "--num-pages", "64", "--page-size", "4") as server:
        assert any("OlmoForCausalLM: the layers are those of transformers" in line for line in server.lines)

        def ask(prompt: list[int]) -> Any:
            sampling = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
            answer = httpx.post(
                f"{server.url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=WAIT_S
            )
            return answer.raise_for_status().json()

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == 10
        assert_greedy(model, prompt, answer["output_ids"])


def test_a_real_model_answers_as_it_does_natively(smollm2: Path) -> None:
    body = {"messages": [{"role": "user", "content": FRANCE}], "temperature": 0, "max_tokens": MAX_TOKENS}
    flags = ("--model-impl", "transformers", "--num-pages", "64", "--max-prefill-length", "16")
    with serving("--model", str(smollm2), *flags) as server:  # most steps of the prompt sample nothing
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": str(smollm2), **body}, timeout=WAIT_S)
    assert CAPITALS["France"] in answer.raise_for_status().json()["choices"][0]["message"]["content"]
    assert any("torch engine" in line and "(layers of transformers" in line for line in server.lines)
