"""POST /v1/classify of a real server: the labels of a tiny BERT are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.test_rerank import DOCUMENTS, QUERY, ask, put_tokenizer, served
from tests.helpers.e2e import ServerProcess
from tests.helpers.encoders import tiny_cross_encoder
from tests.helpers.models import save

pytestmark = pytest.mark.any_cpu

LABELS = ["animals", "weather", "money"]
Classifier = tuple[ServerProcess, Any, Any]


def logits(model: Any, tokenizer: Any, text: str) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokenizer.encode(text).ids])).logits[0]
    return found


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Classifier]:
    model = tiny_cross_encoder("bert", num_labels=3, id2label=dict(enumerate(LABELS)))
    folder = tmp_path_factory.mktemp("labels")
    tokenizer = put_tokenizer(folder)
    with torch.no_grad():  # no label is the likeliest of all texts
        model.classifier.bias -= torch.stack([logits(model, tokenizer, one) for one in DOCUMENTS]).mean(0)
    save(model, folder)
    with served(folder) as server:
        yield server, model, tokenizer


def test_labels_and_probabilities_are_those_of_transformers(classifier: Classifier) -> None:
    server, model, tokenizer = classifier
    found = ask(server, "/v1/classify", model="tiny", input=DOCUMENTS).json()
    assert (found["object"], found["model"]) == ("list", "tiny")
    assert found["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(one).ids) for one in DOCUMENTS)
    for i, (one, text) in enumerate(zip(found["data"], DOCUMENTS, strict=True)):
        wanted = torch.softmax(logits(model, tokenizer, text), 0)
        assert (one["index"], one["num_classes"]) == (i, 3)
        assert one["probs"] == pytest.approx(wanted.tolist(), abs=1e-4)
        assert one["label"] == LABELS[int(wanted.argmax())]
    assert len({one["label"] for one in found["data"]}) > 1
    alone = ask(server, "/classify", input=tokenizer.encode(DOCUMENTS[1]).ids).json()["data"]
    assert alone == [{**found["data"][1], "index": 0}]


def test_a_long_input_is_refused_or_truncated_on_request(classifier: Classifier) -> None:
    server, model, _ = classifier
    long, most = "the cat sleeps " * 100, model.config.max_position_embeddings
    refused = ask(server, "/v1/classify", input=long)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    cut = ask(server, "/v1/classify", input=long, truncate_prompt_tokens=-1).json()
    whole = ask(server, "/v1/classify", input=" ".join(long.split()[: most - 2])).json()
    assert cut["data"] == whole["data"] and cut["usage"]["prompt_tokens"] == most
    refused = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert refused.status_code == 400 and "3 labels" in refused.text
