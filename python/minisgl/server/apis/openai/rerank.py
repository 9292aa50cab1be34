"""Relevance scores of text pairs: POST /v1/rerank (also /rerank and /v2/rerank) as in Cohere's and Jina's API, and POST
/v1/score as in vLLM.

A cross encoder or a judge reads both texts at once; the score is the sigmoid of its output. For any other model with
embeddings the score is the cosine similarity of both vectors.

Invariants: each pair, or each text, is scheduled like any request; equal scores keep the order of the documents.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, StrictBool, StrictStr

from minisgl.frontend.output_processor import Delta
from minisgl.frontend.pairs import SCORING, score
from minisgl.sampling_params import BOUNDS, SamplingParams
from minisgl.server.core.admission import GenerationInput
from minisgl.server.core.answers import Answer
from minisgl.server.core.bodies import PoolingBody
from minisgl.server.core.context import ServerContext
from minisgl.server.core.embeddings import embedding_sampling
from minisgl.server.core.errors import bad_value, no_embedding, wrong
from minisgl.server.core.fields import Body, Int64, TextOr, described
from minisgl.server.core.formatter import Formatter
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.step import Int32Array

_CUT = "with false, what is too long is refused; by default it is cut at its end."
_INSTRUCTION = "What to look for, where the model reads that (Qwen3-Reranker). Default: its model card's."
_TEXTS = Field(min_length=1, max_length=BOUNDS.max_inputs, fail_fast=True)


class Document(Body):
    text: StrictStr


_Document = TextOr[Document]
_OneOrMore = TextOr[Annotated[list[StrictStr], _TEXTS]]


class RerankRequest(PoolingBody):
    query: StrictStr = Field(description="What is looked for.")
    documents: Annotated[list[_Document], _TEXTS] = Field(
        description=f"1 to {BOUNDS.max_inputs} texts, or objects with a `text`."
    )
    top_n: Int64 | None = described("Answer with so many of the best ones. Default: all.", minimum=1)
    return_documents: StrictBool | None = described("Answer with the texts, too; false by default.")
    max_tokens_per_doc: Int64 | None = described("Cohere's: read so many tokens of each document.", minimum=1)
    truncate: StrictBool | None = described(f"A document beside its query: {_CUT}")
    instruction: StrictStr | None = described(_INSTRUCTION)

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(PoolingBody):
    text_1: _OneOrMore = Field(description="A text, or as many as `text_2` has.")
    text_2: _OneOrMore = Field(description="A text, or several; one `text_1` is compared with each.")
    truncate: StrictBool | None = described(f"The second text beside the first: {_CUT}")
    instruction: StrictStr | None = described(_INSTRUCTION)

    def pairs(self) -> list[tuple[str, str]]:
        one, other = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(one) == 1:
            one = one * len(other)
        if len(one) != len(other):
            raise bad_value("text_1", len(one), f"must be one text, or {len(other)} texts as in text_2")
        return list(zip(one, other, strict=True))


class ScoreUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class RerankResult(Answer):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(Answer):
    id: str
    model: str
    results: list[RerankResult]
    meta: dict[str, Any]
    usage: ScoreUsage


class ScoreObject(Answer):
    object: str
    index: int
    score: float


class ScoreAnswer(Answer):
    id: str
    object: str
    model: str
    data: list[ScoreObject]
    usage: ScoreUsage


async def rerank_endpoint(context: ServerContext, body: RerankRequest, request: HttpRequest) -> Formatter:
    for name in ("top_n", "max_tokens_per_doc"):
        if (value := getattr(body, name)) is not None and value < 1:
            raise bad_value(name, value, "must be at least 1")
    pairs = [(body.query, text) for text in body.texts()]
    name = context.served.check(body.model)
    scores = await _Scores.of(context, pairs, ("query", "documents"), body, body.max_tokens_per_doc)
    return _Ranked(name, scores, body)


async def score_endpoint(context: ServerContext, body: ScoreRequest, request: HttpRequest) -> Formatter:
    name = context.served.check(body.model)
    scores = await _Scores.of(context, body.pairs(), ("text_1", "text_2"), body, None)
    return _Scored(name, scores, body)


class _Scores:
    """Prompts to compute for the scores of text pairs, and how to get the scores from their results."""

    def __init__(
        self, prompts: Sequence[Int32Array], sampling: SamplingParams, pairs: Sequence[tuple[int, int]] | None
    ) -> None:
        """`pairs`: indices of two prompts for each score. `None`: each prompt is a pair."""
        self.prompts, self.sampling, self._pairs = prompts, sampling, pairs

    @classmethod
    async def of(
        cls,
        context: ServerContext,
        pairs: Sequence[tuple[str, str]],
        fields: tuple[str, str],
        body: RerankRequest | ScoreRequest,
        most: int | None,
    ) -> _Scores:
        """Encode text pairs for the served model. `fields`: the client's names of both texts; `most`: maximum tokens of
        each second text. Raises `ApiError` 400."""
        cut, instruction = body.truncate is not False, body.instruction
        if instruction is not None and not context.prompts.judges:
            raise bad_value("instruction", instruction, "this model does not read instructions: leave it out")
        if context.info.gives_scores:
            prompts = await context.prompts.encode_pairs(pairs, fields, cut=cut, most=most, instruction=instruction)
            return cls(prompts, SCORING, None)
        sampling = embedding_sampling(context, None)
        begins = context.own_prompts.of_a_search()
        texts = [[begin + text for text in one] for begin, one in zip(begins, zip(*pairs, strict=True), strict=True)]
        places: dict[str, int] = {}
        encoded: list[Int32Array] = []
        for own, field, of_second in zip(texts, fields, (False, True), strict=True):
            new = [text for text in dict.fromkeys(own) if text not in places]
            places |= {text: len(encoded) + i for i, text in enumerate(new)}
            keep = min(most, context.info.max_seq_len - 1) if of_second and most is not None else -1 if cut else None
            given: list[str | list[int]] = list(new)
            encoded += (await context.prompts.encode(given, sampling, keep, field, side="right"))[0]
        both = [(places[one], places[other]) for one, other in zip(*texts, strict=True)]
        return cls(encoded, sampling, both)

    def read(self, generation: Generation, count: int) -> list[float]:
        """Return the relevance scores from the pooled results of `count` prompts."""
        numbers = pooled(generation, count)
        if self._pairs is None:
            labels = [score(one) for one in numbers]
            if len(labels[0]) != 1:
                reason = f"its head has {len(labels[0])} labels: scores need a model with a single label"
                raise wrong("model", reason, "unsupported_value")
            return [sigmoid(one[0]) for one in labels]
        vectors = [np.frombuffer(one, np.float32).astype(np.float64) for one in numbers]
        vectors = [one / (math.sqrt(float(one @ one)) or 1.0) for one in vectors]
        return [float(vectors[one] @ vectors[other]) for one, other in self._pairs]


def pooled(generation: Generation, count: int) -> list[bytes]:
    """Return the pooled vectors of the first `count` prompts. Raises `ApiError` 500 if one is missing."""
    embeddings = [generation.embedding(i) for i in range(count)]
    numbers = [one for one in embeddings if one is not None]
    if len(numbers) < count:
        raise no_embedding()
    return numbers


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


class ScoreFormatter(Formatter):
    def __init__(
        self, model: str, prompts: Sequence[Int32Array], sampling: SamplingParams, priority: int | None
    ) -> None:
        super().__init__(GenerationInput(prompts, sampling), priority=priority)
        self._model = model

    def answer(self, **more: Any) -> dict[str, Any]:
        num_tokens = sum(map(len, self.prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"model": self._model, **more, "usage": usage}


class _Ranked(ScoreFormatter):
    def __init__(self, model: str, scores: _Scores, body: RerankRequest) -> None:
        super().__init__(model, scores.prompts, scores.sampling, body.priority)
        self._scores, self._texts, self._top_n = scores, body.texts(), body.top_n
        self._shows = bool(body.return_documents)

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        scores = self._scores.read(generation, len(choices))
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n]
        results = [
            {"index": i, "relevance_score": scores[i]} | ({"document": {"text": self._texts[i]}} if self._shows else {})
            for i in order
        ]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return self.answer(id=f"rerank-{uuid.uuid4().hex}", results=results, meta=meta)


class _Scored(ScoreFormatter):
    def __init__(self, model: str, scores: _Scores, body: ScoreRequest) -> None:
        super().__init__(model, scores.prompts, scores.sampling, body.priority)
        self._scores = scores

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        scores = self._scores.read(generation, len(choices))
        data = [{"object": "score", "index": i, "score": one} for i, one in enumerate(scores)]
        return self.answer(id=f"score-{uuid.uuid4().hex}", object="list", data=data)
