"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from minisgl.server.context import ServerContext, checked
from minisgl.server.generation import Generation
from minisgl.server.protocol import CompletionRequest, parse
from minisgl.server.transport import SSE_DONE, StreamResponse, json_response, sse, sse_error, unless_gone


async def answer_completion(context: ServerContext, request: Request, body: bytes, arrival_time: float) -> Response:
    completion = parse(body, CompletionRequest)
    context.check_model(completion.model)
    limit = completion.DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    sampling = checked(completion.sampling_params, limit)
    context.check_vocabulary(sampling)
    prompts = await context.encode_prompts(completion.prompts(), "prompt")

    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": context.model_name,
    }
    if completion.stream:
        begin = partial(context.generation, prompts, sampling, arrival_time)
        pieces = _stream(begin, head, completion.include_usage)
        return StreamResponse(pieces, "text/event-stream", sse_error)

    async def whole() -> Response:
        with context.generation(prompts, sampling, arrival_time) as generation:
            return json_response(await _collect(generation, head, len(prompts) * sampling.n))

    return await unless_gone(request.receive, whole())


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def _collect(generation: Generation, head: dict[str, Any], num_choices: int) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    reasons: list[str | None] = [None] * num_choices
    async for deltas in generation.deltas():
        for delta in deltas:
            texts[delta.index].append(delta.text)
            reasons[delta.index] = delta.finish_reason
    choices = [_choice(i, "".join(texts[i]), reasons[i]) for i in range(num_choices)]
    return {**head, "choices": choices, "usage": generation.usage()}


async def _stream(begin: Callable[[], Generation], head: dict[str, Any], include_usage: bool) -> AsyncIterator[bytes]:
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    with begin() as generation:
        async for deltas in generation.deltas():
            yield b"".join(
                sse({**head, "choices": [_choice(d.index, d.text, d.finish_reason)], **usage}) for d in deltas
            )
        if include_usage:
            yield sse({**head, "choices": [], "usage": generation.usage()})
        yield SSE_DONE
