"""POST /v1/classify, as in vLLM: the label that a classifier gives to each text.

Invariants: each text is scheduled like any request.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from minisgl.frontend.output_processor import Delta
from minisgl.frontend.pairs import SCORING, score
from minisgl.sampling_params import BOUNDS
from minisgl.server.apis.openai.rerank import ScoreFormatter, ScoreUsage, pooled, sigmoid
from minisgl.server.core.answers import Answer
from minisgl.server.core.bodies import EmbeddingInput, PoolingBody, inputs_of
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import wrong
from minisgl.server.core.fields import Int64, Side, described
from minisgl.server.core.formatter import Formatter
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.step import Int32Array


class ClassifyRequest(PoolingBody):
    input: EmbeddingInput = Field(
        description=f"A text, up to {BOUNDS.max_inputs} texts, token ids, or lists of token ids; each gets one label."
    )
    truncate_prompt_tokens: Int64 | None = described(
        "Keep only this many of the first tokens of each input; -1: as many as fit. By default what is too long is "
        "refused.",
        minimum=-1,
    )
    truncation_side: Side = described("`right`, the default, keeps the first tokens, `left` the last ones.")


class ClassifiedObject(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer):
    id: str
    object: str
    created: int
    model: str
    data: list[ClassifiedObject]
    usage: ScoreUsage


class Labels(NamedTuple):
    """Labels of a classifier by config.json. `problem`: its `problem_type`, which decides how scores are read."""

    names: Mapping[str, str]
    problem: str | None

    def name(self, number: int) -> str:
        """Return the name of label `number`; transformers omits default names from config.json."""
        return str(self.names.get(str(number), f"LABEL_{number}"))

    def probabilities(self, numbers: Sequence[float]) -> list[float]:
        """Convert the head's outputs to probabilities: softmax, or a sigmoid for each label (multi-label, single
        label); outputs of a regression are returned unchanged."""
        if self.problem == "regression":
            return list(numbers)
        if self.problem == "multi_label_classification" or len(numbers) == 1:
            return [sigmoid(one) for one in numbers]
        most = max(numbers)
        weights = [math.exp(one - most) for one in numbers]
        return [one / math.fsum(weights) for one in weights]


@cache
def own_labels(model_dir: str | None) -> Labels:
    """Return the labels of a model from its config.json. Raises `ApiError` 400 for a model that is no classifier."""
    raw = json.loads((Path(model_dir or "none") / "config.json").read_text(encoding="utf-8"))
    if not str(raw["architectures"][0]).endswith("ForSequenceClassification"):
        reason = "it scores pairs of texts and has no labels: a ...ForSequenceClassification does"
        raise wrong("model", reason, "unsupported_value")
    return Labels(raw.get("id2label") or {}, raw.get("problem_type"))


async def classify_endpoint(context: ServerContext, body: ClassifyRequest, request: HttpRequest) -> Formatter:
    name = context.served.check(body.model)
    prompts, _ = await context.prompts.encode(
        inputs_of(body.input), SCORING, body.truncate_prompt_tokens, "input", side=body.truncation_side or "right"
    )
    return _Classified(name, prompts, own_labels(context.info.model_dir), body.priority)


class _Classified(ScoreFormatter):
    def __init__(self, model: str, prompts: Sequence[Int32Array], labels: Labels, priority: int | None) -> None:
        super().__init__(model, prompts, SCORING, priority)
        self._labels = labels

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        data = []
        for i, numbers in enumerate(pooled(generation, len(choices))):
            probs = self._labels.probabilities(score(numbers))
            label = self._labels.name(probs.index(max(probs)))
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
        named = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return self.answer(**named, data=data)
