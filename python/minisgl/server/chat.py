"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from minisgl.server.context import ServerContext, checked
from minisgl.server.errors import bad_value
from minisgl.server.generation import Generation
from minisgl.server.protocol import ChatRequest, parse
from minisgl.server.transport import SSE_DONE, StreamResponse, json_response, sse, sse_error, unless_gone


async def answer_chat(context: ServerContext, request: Request, body: bytes, arrival_time: float) -> Response:
    chat = parse(body, ChatRequest)
    context.check_model(chat.model)
    if not chat.messages:
        raise bad_value("messages", [], "must not be empty")
    for i, message in enumerate(chat.messages):
        if message.content is None and message.role != "assistant":
            raise bad_value(f"messages.{i}.content", None, f"required for the role {message.role}")
    limit = chat.limit()
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    if limit is not None and limit < 1:
        raise bad_value(name, limit, "must be at least 1")
    sampling = checked(chat.sampling_params, limit)
    context.check_vocabulary(sampling)
    ids = await context.encode_chat([message.for_template() for message in chat.messages])

    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": context.model_name}
    if chat.stream:
        begin = partial(context.generation, [ids], sampling, arrival_time)
        pieces = _stream(begin, head, sampling.n, chat.include_usage)
        return StreamResponse(pieces, "text/event-stream", sse_error)

    async def whole() -> Response:
        with context.generation([ids], sampling, arrival_time) as generation:
            return json_response(await _collect(generation, head, sampling.n))

    return await unless_gone(request.receive, whole())


async def _collect(generation: Generation, head: dict[str, Any], n: int) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in range(n)]
    reasons: list[str | None] = [None] * n
    async for deltas in generation.deltas():
        for delta in deltas:
            texts[delta.index].append(delta.text)
            reasons[delta.index] = delta.finish_reason
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": "".join(texts[i]), "refusal": None},
            "logprobs": None,
            "finish_reason": reasons[i],
        }
        for i in range(n)
    ]
    return {**head, "object": "chat.completion", "choices": choices, "usage": generation.usage()}


async def _stream(
    begin: Callable[[], Generation], head: dict[str, Any], n: int, include_usage: bool
) -> AsyncIterator[bytes]:
    head = {**head, "object": "chat.completion.chunk"}
    usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse({**head, "choices": [choice], **usage})

    with begin() as generation:
        roles = [chunk(i, {"role": "assistant", "content": ""}) for i in range(n)]
        async for deltas in generation.deltas():
            frames, roles = roles, []  # the roles go with the first tokens, so that an early failure is an HTTP error
            for delta in deltas:
                if delta.text:
                    frames.append(chunk(delta.index, {"content": delta.text}))
                if delta.finish_reason is not None:
                    frames.append(chunk(delta.index, {}, delta.finish_reason))
            yield b"".join(frames)
        if include_usage:
            yield sse({**head, "choices": [], "usage": generation.usage()})
        yield SSE_DONE
