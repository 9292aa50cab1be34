"""POST /generate: one prompt, plain answers; streaming sends JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.server.bodies import GenerateRequest, GenerateSampling
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value
from minisgl.server.generation import Delta, Generation, collect
from minisgl.server.protocol import parse
from minisgl.server.record import RequestRecord
from minisgl.server.transport import StreamResponse, json_line, json_response


async def answer_generate(context: ServerContext, request: Request, body: bytes, record: RequestRecord) -> Response:
    generate = parse(body, GenerateRequest)
    if (generate.prompt is None) == (generate.input_ids is None):
        raise ApiError(400, "prompt: give either prompt or input_ids", param="prompt", code="invalid_value")
    field = "prompt" if generate.input_ids is None else "input_ids"
    prompt: str | list[int] = generate.prompt if generate.prompt is not None else generate.input_ids or []
    fields = generate.sampling_params or GenerateSampling()
    sampling = _sampling(fields, context.defaults)
    context.check_vocabulary(sampling, "sampling_params.")
    if sampling.n != 1:
        raise bad_value("sampling_params.n", sampling.n, "must be 1 here")
    prompts = await context.encode_prompts([prompt], field)
    begin = partial(context.generation, prompts, sampling, record, priority=fields.priority or 0)
    if generate.stream:
        return StreamResponse(_Lines(begin), "application/x-ndjson")
    with begin() as generation:
        [found] = await collect(generation, 1)
        done = _end(generation, found.finish_reason)
        return json_response({"text": found.text, "token_ids": generation.token_ids(0), **done})


def _sampling(fields: GenerateSampling, defaults: Mapping[str, Any]) -> SamplingParams:
    """Errors name the field as the client wrote it."""
    limit = fields.max_tokens if fields.max_new_tokens is None else fields.max_new_tokens
    if limit is None:
        limit = GenerateRequest.DEFAULT_MAX_TOKENS
    name = "max_tokens" if fields.max_new_tokens is None else "max_new_tokens"
    if limit < 1:
        raise bad_value(f"sampling_params.{name}", limit, "must be at least 1")
    try:
        return fields.sampling_params(limit, defaults)
    except ParamError as error:
        raise ApiError(
            400, f"sampling_params.{error}", param=f"sampling_params.{error.field}", code="invalid_value"
        ) from error


def _end(generation: Generation, finish_reason: str | None) -> dict[str, Any]:
    return {"finish_reason": finish_reason, "usage": generation.usage()}


class _Lines:
    """The `Pieces` of a stream."""

    def __init__(self, begin: Callable[[], Generation]) -> None:
        self.begin = begin

    def piece(self, generation: Generation, deltas: list[Delta]) -> bytes:
        lines = [json_line({"text_delta": delta.text}) for delta in deltas if delta.text]
        if (reason := deltas[-1].finish_reason) is not None:
            lines.append(json_line({"event": "done", **_end(generation, reason)}))
        return b"".join(lines)

    def end(self, generation: Generation) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return json_line(error.body)
