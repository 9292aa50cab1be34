"""Embeddings of the embedded model through a real server: those of transformers, one text near itself, texts of one
matter nearer to each other than to another's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import openai
import pytest
import torch

from minisgl.weights.gguf_import import import_gguf
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.meaning import embedded_model
from tests.helpers.seconds import WAIT_S

SMOLLM2 = embedded_model()

pytestmark = pytest.mark.any_cpu
TEXTS = ["The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Interest rates rose by two percent."]


@pytest.fixture(
    scope="module", params=["cpu", *(pytest.param(how, marks=pytest.mark.slow) for how in ("torch", "dp", "tp"))]
)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    how = {
        "cpu": ["--engine", "cpu"],
        "torch": ["--engine", "torch"],
        "dp": ["--engine", "cpu", "--dp", "2"],
        "tp": ["--engine", "torch", "--tp", "3"],
    }
    with serving("--model", "smollm2", *how[request.param], env={"OMP_NUM_THREADS": "1"}) as running:
        yield running


def vectors(server: ServerProcess, texts: list[str], pooling: str = "mean", **more: object) -> np.ndarray:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=WAIT_S, max_retries=0)
    answer = client.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": pooling}, **more)  # type: ignore[arg-type]
    return np.array([one.embedding for one in answer.data])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_those_of_transformers(server: ServerProcess, pooling: str) -> None:
    import transformers

    folder = import_gguf(SMOLLM2, lambda text, done=0, total=0: None)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = vectors(server, TEXTS, pooling)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = (hidden.mean(0) if pooling == "mean" else hidden[-1]).numpy()
        assert float(vector @ expected / np.linalg.norm(expected)) > 0.999  # keys, values and weights are rounded


def test_texts_on_one_subject_have_similar_embeddings(server: ServerProcess) -> None:
    cat, kitten, rates = vectors(server, TEXTS)
    assert cat @ kitten > cat @ rates and cat @ kitten > kitten @ rates
    again = vectors(server, [TEXTS[0], *TEXTS], encoding_format="float")
    assert float(cat @ again[0]) > 0.999 and float(cat @ again[1]) > 0.999  # torch computes in bfloat16
