"""POST /v1/rerank and /v1/score of real servers: the scores of a tiny cross encoder are those of transformers for each
pair, those of a tiny Qwen3-Reranker what its model card computes, those of an encoder the cosines of its vectors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.encoders import (
    hidden_states,
    judging,
    tiny_cross_encoder,
    tiny_encoder,
)
from tests.helpers.models import reference_logits, save, tiny_model
from tests.helpers.seconds import WAIT_S
from tests.helpers.text import data_folder, library
from tests.helpers.variants import CARD_INSTRUCTION, CARD_PREFIX, CARD_SUFFIX

pytestmark = pytest.mark.any_cpu

WITHIN = 1e-4
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sleeps",
    "runs",
    "on",
    "in",
    "sofa",
    "street",
    "rates",
    "rose",
    "by",
    "two",
    "percent",
]
WORDS += ["who", "where", "what"]
QUERY = "where sleeps the cat"
DOCUMENTS = ["the dog runs in the street", "the cat sleeps on the sofa", "rates rose by two percent", "the cat sleeps"]


def put_tokenizer(folder: Path) -> Any:
    """Words, and BERT's special tokens around one text or two; as transformers reads it back."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def served(folder: Path) -> Any:
    return serving("--model", str(folder), "--served-model-name", "tiny", "--num-threads", "1")


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Any, Any]]:
    model = tiny_cross_encoder("bert")
    folder = save(model, tmp_path_factory.mktemp("cross"))
    tokenizer = put_tokenizer(folder)
    with served(folder) as server:
        yield server, model, tokenizer


def ask(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=WAIT_S)


def expected(model: Any, tokenizer: Any, query: str, document: str) -> float:
    found = tokenizer.encode(query, document)
    with torch.inference_mode():
        ids, types = torch.tensor([found.ids]), torch.tensor([found.type_ids])
        return float(torch.sigmoid(model(ids, token_type_ids=types).logits[0, 0]))


def test_documents_come_in_the_order_of_the_models_own_scores(crossed: tuple[ServerProcess, Any, Any]) -> None:
    server, model, tokenizer = crossed
    wanted = [expected(model, tokenizer, QUERY, one) for one in DOCUMENTS]
    answer = ask(server, "/v1/rerank", model="tiny", query=QUERY, documents=DOCUMENTS, return_documents=True).json()
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=WITHIN)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == len(DOCUMENTS)
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(QUERY, one).ids) for one in DOCUMENTS)
    given = [{"text": one} for one in DOCUMENTS]
    for path in ("/rerank", "/v2/rerank"):
        best = ask(server, path, query=QUERY, documents=given, top_n=2).json()["results"]
        assert best == [
            {"index": one["index"], "relevance_score": one["relevance_score"]} for one in answer["results"][:2]
        ]


def test_pairs_have_scores_in_their_order(crossed: tuple[ServerProcess, Any, Any]) -> None:
    server, model, tokenizer = crossed
    one = ask(server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS).json()
    assert [found["score"] for found in one["data"]] == pytest.approx(
        [expected(model, tokenizer, QUERY, text) for text in DOCUMENTS], abs=WITHIN
    )
    paired = ask(server, "/score", text_1=DOCUMENTS[:2], text_2=DOCUMENTS[2:]).json()
    assert [found["score"] for found in paired["data"]] == pytest.approx(
        [expected(model, tokenizer, *two) for two in zip(DOCUMENTS[:2], DOCUMENTS[2:], strict=True)], abs=WITHIN
    )


def test_a_long_document_is_cut_or_refused(crossed: tuple[ServerProcess, Any, Any]) -> None:
    server, model, tokenizer = crossed
    long, most = "the cat sleeps " * 100, model.config.max_position_embeddings
    room = most - len(tokenizer.encode(QUERY, "").ids)
    score = ask(server, "/v1/rerank", query=QUERY, documents=[long]).json()["results"][0]["relevance_score"]
    assert score == pytest.approx(expected(model, tokenizer, QUERY, " ".join(long.split()[:room])), abs=WITHIN)
    score = ask(server, "/v1/rerank", query=QUERY, documents=[long], max_tokens_per_doc=3).json()["results"][0]
    assert score["relevance_score"] == pytest.approx(expected(model, tokenizer, QUERY, "the cat sleeps"), abs=WITHIN)
    refused = ask(server, "/v1/rerank", query=QUERY, documents=[long], truncate=False)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"
    refused = ask(server, "/v1/rerank", query=long, documents=DOCUMENTS)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "query"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", 3]}, "documents.1"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents.0.text"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "find"}, "instruction"),
        ("/v1/score", {"text_1": ["a", "a"], "text_2": ["a"] * 3}, "text_1"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/embeddings", {"input": "a"}, "pooling"),
    ],
)
def test_invalid_rerank_requests_return_400_and_name_the_field(
    crossed: tuple[ServerProcess, Any, Any], path: str, body: dict[str, Any], named: str
) -> None:
    refused = ask(crossed[0], path, **body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == named, refused.text


class Judge(NamedTuple):
    """A tiny Qwen3-Reranker, served, and what its model card makes of two texts."""

    server: ServerProcess
    model: Any
    tokenizer: Tokenizer

    def score(self, query: str, document: str, instruction: str = CARD_INSTRUCTION, room: int | None = None) -> float:
        """`room`: of the texts so many tokens are read."""

        def ids(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        texts = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        prompt = [*ids(CARD_PREFIX), *ids(texts)[:room], *ids(CARD_SUFFIX)]
        both = [self.tokenizer.token_to_id(word) for word in ("no", "yes")]
        return float(torch.softmax(reference_logits(self.model, prompt)[-1][both], 0)[1])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    tokenizer = library("qwen3")
    model = tiny_model("qwen3-tied", vocab_size=tokenizer.get_vocab_size(), hidden_size=32)
    folder = save(model, tmp_path_factory.mktemp("judge"))
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    judging(folder, true_token_id=yes, false_token_id=no)
    shutil.copy(data_folder("qwen3") / "tokenizer.json", folder)
    with served(folder) as server:
        yield Judge(server, model, tokenizer)


def test_scores_of_a_language_model_equal_its_model_cards(judge: Judge) -> None:
    wanted = [judge.score(QUERY, one) for one in DOCUMENTS]
    assert max(wanted) - min(wanted) > 100 * WITHIN
    answer = ask(judge.server, "/v1/rerank", query=QUERY, documents=DOCUMENTS).json()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[i] for i in range(len(DOCUMENTS))] == pytest.approx(wanted, abs=WITHIN)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    alone = ask(judge.server, "/v1/rerank", query=QUERY, documents=DOCUMENTS[:1]).json()["results"]
    assert alone[0]["relevance_score"] == found[0]
    lines = httpx.get(judge.server.url + "/metrics", timeout=WAIT_S).text.splitlines()
    (cached,) = (float(line.split()[-1]) for line in lines if line.startswith("minisgl:cached_tokens_total"))
    assert cached >= 48 * len(DOCUMENTS), "all begin with the same form and question"
    other = "Find {what} sleeps."
    scored = ask(judge.server, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, instruction=other).json()["data"]
    wanted = [judge.score(QUERY, one, other) for one in DOCUMENTS]
    assert [one["score"] for one in scored] == pytest.approx(wanted, abs=WITHIN)


def test_a_long_document_is_truncated_and_a_long_query_is_refused(judge: Judge) -> None:
    long, most = "the cat sleeps on the sofa. " * 100, judge.model.config.max_position_embeddings
    room = most - 1 - sum(len(judge.tokenizer.encode(one).ids) for one in (CARD_PREFIX, CARD_SUFFIX))
    (found,) = ask(judge.server, "/v1/rerank", query=QUERY, documents=[long]).json()["results"]
    assert found["relevance_score"] == pytest.approx(judge.score(QUERY, long, room=room), abs=WITHIN)
    (found,) = ask(judge.server, "/v1/rerank", query=QUERY, documents=[long], max_tokens_per_doc=3).json()["results"]
    assert found["relevance_score"] == pytest.approx(judge.score(QUERY, "the cat sleeps"), abs=WITHIN)
    for field, body in (
        ("documents", {"documents": [long], "truncate": False}),
        ("query", {"query": long}),
        ("instruction", {"instruction": long}),
    ):
        refused = ask(judge.server, "/v1/rerank", **{"query": QUERY, "documents": ["a"], **body})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text
    refused = ask(judge.server, "/v1/completions", prompt="a")
    assert refused.status_code == 400 and "scores" in refused.json()["error"]["message"]
    refused = ask(judge.server, "/v1/classify", input="a")
    assert refused.status_code == 400 and "no labels" in refused.json()["error"]["message"]


def test_scores_of_an_encoder_are_cosines(tmp_path: Path) -> None:
    model = tiny_encoder("bert")
    folder = save(model, tmp_path)
    tokenizer = put_tokenizer(folder)

    def vector(text: str) -> np.ndarray:
        mean = hidden_states(model, tokenizer.encode(text).ids).mean(0)
        return (mean / mean.norm()).numpy()

    with served(folder) as server:
        answer = ask(server, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    for result in answer.json()["results"]:
        wanted = float(vector(QUERY) @ vector(DOCUMENTS[result["index"]]))
        assert result["relevance_score"] == pytest.approx(wanted, abs=WITHIN)
