"""Embeddings of texts, whichever API requests them.

Invariants: an input is scheduled like any request and ends with its prefill; a vector has unit L2 norm for any
`dimensions`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.frontend.output_processor import Delta
from minisgl.frontend.pooling import Name as Pooled
from minisgl.message import EngineReady
from minisgl.sampling_params import SamplingParams
from minisgl.server.core.admission import GenerationInput
from minisgl.server.core.bodies import EmbeddingRequest, inputs_of
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import bad_value, no_embedding, too_many_dimensions, wrong
from minisgl.server.core.formatter import Formatter
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.step import Int32Array


def gives_embeddings(info: EngineReady) -> bool:
    return info.engine in ("cpu", "torch") and not info.device.startswith("cuda")


async def embeddings_endpoint(
    context: ServerContext,
    body: EmbeddingRequest,
    request: HttpRequest,
    shown_as: type[EmbeddingFormatter] | None = None,
) -> EmbeddingFormatter:
    if body.dimensions is not None and body.dimensions < 1:
        raise bad_value("dimensions", body.dimensions, "must be at least 1")
    sampling = embedding_sampling(context, body.pooling)
    prompts, sampling = await context.prompts.encode(
        _with_prompt(context, body), sampling, body.truncate_prompt_tokens, "input", side=body.truncation_side
    )
    return (shown_as or EmbeddingFormatter)(context.served.check(body.model), body, prompts, sampling)


def embedding_sampling(context: ServerContext, pooling_name: Pooled | None) -> SamplingParams:
    """Return sampling parameters for an embedding with the pooling `pooling_name`, else the model's own. Raises
    `ApiError` 400 if the engine gives no embeddings, or the model's pooling is not supported and none was requested."""
    info = context.info
    if not gives_embeddings(info):
        where = f"the {info.engine} engine on {info.device}"
        reason = f"embeddings need the cpu engine or torch on the CPU: this is {where}"
        raise wrong("model", reason, "unsupported_value")
    pooling = pooling_name or context.pooling.name
    if pooling is None:
        reason = f"the model's own pooling is not supported: {context.pooling.why}: use mean, last or cls"
        raise wrong("pooling", reason, "unsupported_value")
    return SamplingParams(max_tokens=1, temperature=0.0, seed=0, embedding=pooling)


def _with_prompt(context: ServerContext, body: EmbeddingRequest) -> list[Any]:
    """Return the inputs, each text with the requested prompt of the model (`prompt_name`) before it."""
    own = context.own_prompts
    try:
        begin = own.of(body.prompt_name)
    except KeyError:
        known = ", ".join(own.texts) or "none"
        raise bad_value("prompt_name", body.prompt_name, f"the model's prompts are: {known}") from None
    return [begin + one if isinstance(one, str) and one else one for one in inputs_of(body.input)]


class EmbeddingFormatter(Formatter):
    def __init__(
        self, model: str, body: EmbeddingRequest, prompts: Sequence[Int32Array], sampling: SamplingParams
    ) -> None:
        super().__init__(GenerationInput(prompts, sampling), priority=body.priority)
        self._model = model
        self._dimensions = body.dimensions
        self._as_text = body.encoding_format == "base64"

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": i, "embedding": self._shown(generation.embedding(i))}
            for i in range(len(choices))
        ]
        num_tokens = sum(map(len, self.prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    def _shown(self, pooled: bytes | None) -> list[float] | str:
        if pooled is None:
            raise no_embedding()
        whole = np.frombuffer(pooled, np.float32).astype(np.float64)
        if self._dimensions is not None and self._dimensions > len(whole):
            raise too_many_dimensions(self._dimensions, len(whole))
        numbers = whole[: self._dimensions]
        # sequential sum, as in the gateway: another order could change the last bit
        length = float(np.sqrt(np.cumsum(numbers * numbers)[-1])) if len(numbers) else 0.0
        scaled = (numbers / (length or 1.0)).astype(np.float32)
        return base64.b64encode(scaled.astype("<f4").tobytes()).decode() if self._as_text else scaled.tolist()
