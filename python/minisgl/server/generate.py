"""POST /generate: one `prompt`, plain answers; streaming sends JSON lines. `text` and `input_ids` are answered as
SGLang does (sglang.py).

Invariants: a field means the same in `sampling_params` and beside it; given twice, it says the same twice; errors name
the field as the client wrote it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minisgl.frontend.output_processor import Delta
from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.server.bodies import GenerateRequest, GenerateSampling
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value
from minisgl.server.formatter import Formatter, json_bytes
from minisgl.server.generation import Generation
from minisgl.server.lengths import asked_limit
from minisgl.server.sglang import SglangFormatter
from minisgl.step import Int32Array


async def generate_endpoint(context: ServerContext, generate: GenerateRequest) -> Formatter:
    field, given = _prompt(generate)
    fields, names = _merged(generate)
    if context.check_model(fields.model) != context.check_model(generate.model):
        raise bad_value("model", fields.model, "name an adapter beside sampling_params, not in it")
    with _named(names):
        limit, only_prompt = asked_limit("max_tokens", fields.max_tokens, GenerateRequest.DEFAULT_MAX_TOKENS)
        sampling = fields.to_sampling(limit, context.defaults, **generate.logprob_fields())
        if sampling.n != 1 and field == "prompt":
            raise ParamError("n", sampling.n, "must be 1 here")
        sampling = await context.with_grammar(sampling, fields.grammar_source(names))
    is_list = isinstance(given, list) and not (given and isinstance(given[0], int))
    texts: Any = given if is_list and given else [given]
    names |= {"logprobs": "return_logprob", "prompt_logprobs": "return_logprob"}
    prompts, sampling = await context.encode(texts, sampling, fields.truncate_prompt_tokens, field, names)
    if field == "prompt":
        return GenerateFormatter(fields, prompts, sampling, only_prompt=only_prompt)
    return SglangFormatter(
        context, fields, prompts, sampling, is_list=is_list, generate=generate, only_prompt=only_prompt
    )


def _prompt(generate: GenerateRequest) -> tuple[str, str | list[Any]]:
    """The one that is given, and its name."""
    found: dict[str, str | list[Any]] = {}
    for name in ("prompt", "text", "input_ids"):
        if (value := getattr(generate, name)) is not None and value not in found.values():
            found[name] = value
    if len(found) != 1:
        given = " and ".join(found) or "none"
        reason = f"prompt: give one of prompt, text and input_ids (got {given})"
        raise ApiError(400, reason, param="prompt", code="invalid_value")
    return found.popitem()


def _merged(generate: GenerateRequest) -> tuple[GenerateSampling, dict[str, str]]:
    """The fields of `sampling_params` and those beside it, under the names of `Sampling`, and how the client wrote
    each. Raises `ApiError` for one that is given twice with different values."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for prefix, body in (("sampling_params.", generate.sampling_params), ("", generate)):
        for given in GenerateSampling.model_fields if body is not None else ():
            if (value := getattr(body, given)) is None:
                continue
            name, written = GenerateSampling.NAMES.get(given, given), prefix + given
            if name in values and values[name] != value:
                raise bad_value(written, value, f"differs from {names[name]}, which is {values[name]!r:.80}")
            values[name] = value
            names[name] = written
    return GenerateSampling.model_construct(**values), names


@contextlib.contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """A `ParamError` is an answer that names the field as the client wrote it."""
    try:
        yield
    except ParamError as error:
        name, dot, place = error.field.partition(".")
        written = names.get(name, name) + dot + place
        text = written + str(error).removeprefix(error.field)
        raise ApiError(400, text, param=written, code="invalid_value") from error


def _end(generation: Generation, finish_reason: str | None) -> dict[str, Any]:
    return {"finish_reason": finish_reason, "usage": generation.usage()}


class GenerateFormatter(Formatter):
    media_type = b"application/x-ndjson"

    def __init__(
        self, fields: GenerateSampling, prompts: Sequence[Int32Array], sampling: SamplingParams, *, only_prompt: bool
    ) -> None:
        super().__init__(
            prompts,
            sampling,
            stream=fields.stream,
            priority=fields.priority,
            names_length=fields.max_tokens is not None,
            only_prompt=only_prompt,
        )
        self._continuous_usage = fields.continuous_usage
        self._with_token_ids = bool(fields.return_token_ids)
        # of the next line
        self._more: dict[str, Any] = {"prompt_token_ids": prompts[0].tolist()} if self._with_token_ids else {}

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        [found] = choices
        done = _end(generation, found.finish_reason)
        return {"text": found.text, "token_ids": generation.token_ids(0), **done, **self._more}

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        lines = []
        for delta in deltas:
            if self._with_token_ids:
                self._more["token_ids"] = generation.new_token_ids(0)
            if self._continuous_usage:
                self._more["usage"] = generation.usage()
            if delta.text or self._more.get("token_ids"):
                lines.append(_line({"text_delta": delta.text, **self._more}))
                self._more = {}
        if (reason := deltas[-1].finish_reason) is not None:
            lines.append(_line({"event": "done", **_end(generation, reason)}))
        return b"".join(lines)

    def end(self, generation: Generation) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return _line(error.body)


def _line(data: object) -> bytes:
    return json_bytes(data) + b"\n"
