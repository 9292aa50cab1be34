"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from minisgl.server.bodies import ChatRequest
from minisgl.server.context import ServerContext, checked
from minisgl.server.errors import bad_value
from minisgl.server.generation import Generation, ScoredToken, collect
from minisgl.server.logprobs import chat_logprobs
from minisgl.server.protocol import parse
from minisgl.server.record import RequestRecord
from minisgl.server.transport import SSE_DONE, StreamResponse, json_response, sse, sse_error


async def answer_chat(context: ServerContext, request: Request, body: bytes, record: RequestRecord) -> Response:
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
    if limit is None:
        limit = context.defaults.get("max_tokens")
    sampling = checked(lambda: chat.sampling_params(limit, context.defaults, logprobs=chat.num_logprobs()))
    context.check_vocabulary(sampling)
    ids = await context.encode_chat(chat.messages, chat)

    answer = _Answer(context, sampling.n, with_logprobs=sampling.logprobs is not None)
    begin = partial(context.generation, [ids], sampling, record, priority=chat.priority or 0)
    if chat.stream:
        return StreamResponse(answer.stream(begin, chat.include_usage), "text/event-stream", sse_error)

    with begin() as generation:
        return json_response(await answer.collect(generation))


class _Answer:
    def __init__(self, context: ServerContext, n: int, *, with_logprobs: bool) -> None:
        self._tokenizer = context.tokenizer
        self._n = n
        self._with_logprobs = with_logprobs
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": context.model_name}

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._with_logprobs else None

    async def collect(self, generation: Generation) -> dict[str, Any]:
        choices = await collect(generation, self._n)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.tokens),
                    "finish_reason": choice.finish_reason,
                }
                for i, choice in enumerate(choices)
            ],
            "usage": generation.usage(),
        }

    async def stream(self, begin: Callable[[], Generation], include_usage: bool) -> AsyncIterator[bytes]:
        head = {**self._head, "object": "chat.completion.chunk"}
        usage: dict[str, Any] = {"usage": None} if include_usage else {}

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            return sse({**head, "choices": [choice], **usage})

        with begin() as generation:
            roles = [chunk(i, {"role": "assistant", "content": ""}) for i in range(self._n)]
            async for deltas in generation.deltas():
                frames, roles = roles, []  # the roles go with the first tokens: an early failure is an HTTP error
                for delta in deltas:
                    if delta.text or delta.tokens:
                        frames.append(chunk(delta.index, {"content": delta.text}, self._logprobs(delta.tokens)))
                    if delta.finish_reason is not None:
                        frames.append(chunk(delta.index, {}, None, delta.finish_reason))
                yield b"".join(frames)
            if include_usage:
                yield sse({**head, "choices": [], "usage": generation.usage()})
            yield SSE_DONE
