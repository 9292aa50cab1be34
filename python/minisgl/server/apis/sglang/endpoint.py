"""POST /generate. A `prompt` gets a plain response, streamed as JSON lines. `text` or `input_ids` get SGLang's: with
`meta_info`, streamed as server-sent events, each with all of the text so far. SGLang's routes for information about the
server are here, too.

Invariants: a field means the same in `sampling_params` and at the top level; given in both, the values must agree;
errors name the field as the client wrote it. One prompt has one result, several have a list.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.parsers import ids
from minisgl.sampling_params import BOUNDS, ParamError
from minisgl.server.apis.sglang.body import AbortGenerate, GenerateRequest, GenerateSampling
from minisgl.server.core.admission import GenerationInput
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import ApiError, bad_value, wrong
from minisgl.server.core.formatter import Formatter, GatewayFormat, JsonList, final_fields, json_line, token_text
from minisgl.server.core.generation import Generation
from minisgl.server.core.lengths import asked_limit
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.streams import LINE_PING, SSE_DONE, sse


class SglangFormatter(Formatter):
    def __init__(
        self,
        context: ServerContext,
        fields: GenerateSampling,
        wanted: GenerationInput,
        generate: GenerateRequest,
        is_list: bool,
    ) -> None:
        super().__init__(wanted, fields.stream, fields.priority)
        sampling, num_answers = wanted.sampling, len(wanted.prompts) * wanted.sampling.n
        self._n = sampling.n
        self._is_list = is_list or sampling.n > 1
        self._with_token_ids = bool(fields.return_token_ids)
        wanted.rid = self._id = generate.rid or ids.new_id()
        self._logprobs = SglangLogprobs(context, generate, num_answers) if generate.return_logprob else None
        self._began = time.monotonic()
        self._texts = [""] * num_answers  # text so far, by choice; streams only

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> Any:
        for one in choices:
            self._take(one)
        answers = [self._answer(generation, at, one.text, one.finish_reason) for at, one in enumerate(choices)]
        return answers if self._is_list else answers[0]

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        for delta in deltas:
            at = delta.index
            self._texts[at] += delta.text
            self._take(delta)
            answer = self._answer(generation, at, self._texts[at], delta.finish_reason)
            frames.append(sse({**answer, "index": at} if self._is_list else answer))
        return b"".join(frames)

    def _take(self, delta: Delta) -> None:
        if self._logprobs is not None:
            self._logprobs.take(delta)

    def end(self, generation: Generation) -> bytes:
        return SSE_DONE

    def _answer(self, generation: Generation, at: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        ids = generation.token_ids(at)
        usage = generation.usage_of(at)
        prompt = at // self._n
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "id": self._id if len(self._texts) == 1 else f"{self._id}-{at}",
                "finish_reason": self._reason(generation, at, ids, finish_reason),
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "e2e_latency": time.monotonic() - self._began,
                **({} if self._logprobs is None else self._logprobs.shown(generation, at, prompt)),
            },
            "token_ids": ids,
            "finish_reason": finish_reason,
            "usage": usage,
            **({"prompt_token_ids": self.prompts[prompt].tolist()} if self._with_token_ids else {}),
        }

    def _reason(
        self, generation: Generation, at: int, ids: Sequence[int], finish_reason: str | None
    ) -> dict[str, Any] | None:
        if finish_reason is None:
            return None
        if finish_reason != "stop":
            return {"type": finish_reason, "length": len(ids)}
        return {"type": "stop", "matched": generation.ended_by(at)}


async def abort_endpoint(context: ServerContext, body: AbortGenerate, request: HttpRequest) -> Response:
    """End requests of the caller's key by `rid`, or all. Their responses have the finish reason `abort`."""
    if not body.abort_all and body.rid is None:
        raise wrong("rid", "give rid, or abort_all: true", "missing_required_parameter")
    for key, rid, end_early in tuple(context.abort_entries):
        if key == request.key and (body.abort_all or rid == body.rid):
            end_early()
    return Response(media_type="text/plain")


class SglangLogprobs:
    """Log probabilities in `meta_info` for requests with `return_logprob`, accumulated as tokens arrive."""

    def __init__(self, context: ServerContext, body: GenerateRequest, num_answers: int) -> None:
        self._tokenizer = context.tokenizer if body.return_text_in_logprobs else None
        self._with_top = bool(body.top_logprobs_num)
        self._from_prompt = body.from_prompt
        self._output = [(JsonList(), JsonList()) for _ in range(num_answers)]
        self._input: dict[int, dict[str, Any]] = {}  # by prompt, since each event repeats it

    def take(self, delta: Delta) -> None:
        self._add(self._output[delta.index], delta.logprobs)

    def shown(self, generation: Generation, at: int, prompt: int) -> dict[str, Any]:
        fields = self._lists("output", self._output[at])
        if self._from_prompt is not None:
            if prompt not in self._input:
                self._add(lists := (JsonList(), JsonList()), generation.prompt_tokens(at)[self._from_prompt :])
                self._input[prompt] = self._lists("input", lists)
            fields |= self._input[prompt]
        return fields

    def _add(self, lists: tuple[JsonList, JsonList], tokens: Sequence[Logprob]) -> None:
        lists[0].add(self._triple(one.token_id, one.logprob) for one in tokens)
        if self._with_top:
            lists[1].add(None if one.logprob is None else [self._triple(*top) for top in one.top] for one in tokens)

    def _lists(self, name: str, lists: tuple[JsonList, JsonList]) -> dict[str, Any]:
        fields = {f"{name}_token_logprobs": lists[0].shown()}
        return fields | ({f"{name}_top_logprobs": lists[1].shown()} if self._with_top else {})

    def _triple(self, token_id: int, logprob: float | None) -> list[Any]:
        return [logprob, token_id, None if self._tokenizer is None else token_text(self._tokenizer, token_id)]


def model_info(context: ServerContext) -> dict[str, Any]:
    info, root = context.info, context.config.engine.shown_model
    return {
        "model_path": root,
        "tokenizer_path": root,
        "is_generation": True,
        "served_model_name": context.served.name,
        "max_model_len": info.max_seq_len,
        "vocab_size": info.vocab_size,
        "preferred_sampling_params": None,
    }


async def generate_endpoint(context: ServerContext, generate: GenerateRequest, request: HttpRequest) -> Formatter:
    field, given = _prompt(generate)
    is_list = isinstance(given, list) and not (given and isinstance(given[0], int))
    texts: Any = given if is_list and given else [given]
    params = generate.sampling_params
    if isinstance(params, list) and len(params) != len(texts):
        raise bad_value("sampling_params", len(params), f"must have one entry per prompt: {len(texts)}")
    if not isinstance(params, list) or all(one == params[0] for one in params):
        one = params[0] if isinstance(params, list) else params
        fields, wanted = await _wanted(context, generate, one, "sampling_params.", field, texts)
    else:
        fields, wanted = await _wanted_by_prompt(context, generate, params, field, texts)
    if field == "prompt":
        return GenerateFormatter(fields, wanted)
    return SglangFormatter(context, fields, wanted, generate, is_list)


async def _wanted(
    context: ServerContext,
    generate: GenerateRequest,
    params: GenerateSampling | None,
    prefix: str,
    field: str,
    texts: list[Any],
) -> tuple[GenerateSampling, GenerationInput]:
    """Check and encode prompts with the same parameters. `prefix`: their path in the body. Raises `ApiError`."""
    fields, names = _merged(generate, params, prefix)
    if context.served.check(fields.model) != context.served.check(generate.model):
        raise bad_value("model", fields.model, "name an adapter at the top level, not in sampling_params")
    with _named(names):
        limit, only_prompt = asked_limit("max_tokens", fields.max_tokens, BOUNDS.generate_tokens)
        sampling = fields.to_sampling(limit, context.served.defaults, **generate.logprob_fields())
        if sampling.n != 1 and field == "prompt":
            raise ParamError("n", sampling.n, "must be 1 with prompt")
        sampling, left_out = await context.prompts.with_grammar(sampling, fields.grammar_source(names))
    names |= {"logprobs": "return_logprob", "prompt_logprobs": "return_logprob"}
    prompts, sampling = await context.prompts.encode(
        texts, sampling, fields.truncate_prompt_tokens, field, names, side=fields.truncation_side
    )
    return fields, GenerationInput(prompts, sampling, fields.max_tokens is not None, only_prompt, ignored=left_out)


async def _wanted_by_prompt(
    context: ServerContext, generate: GenerateRequest, params: list[GenerateSampling], field: str, texts: list[Any]
) -> tuple[GenerateSampling, GenerationInput]:
    """Check and encode prompts, each with sampling parameters of its own. Raises `ApiError`."""
    checked_prompts = []
    for i, (one, text) in enumerate(zip(params, texts, strict=True)):
        checked_prompts.append(await _wanted(context, generate, one, f"sampling_params.{i}.", field, [text]))
        for name in SAME_FOR_ALL:
            value, first = getattr(checked_prompts[i][0], name), getattr(checked_prompts[0][0], name)
            if value != first:
                raise bad_value(f"sampling_params.{i}.{name}", value, "must be the same for all prompts of a request")
    wanted = [one for _, one in checked_prompts]
    if len({(one.only_prompt, one.has_client_limit) for one in wanted}) > 1:
        reason = "max_tokens must be 0, more than 0, or left out for all prompts of a request alike"
        raise bad_value("sampling_params", len(params), reason)
    whole = wanted[0]
    whole.prompts = [prompt for one in wanted for prompt in one.prompts]
    whole.by_prompt = [one.sampling for one in wanted]
    whole.ignored = tuple(dict.fromkeys(name for one in wanted for name in one.ignored))
    return checked_prompts[0][0], whole


SAME_FOR_ALL = ("n", "stream", "stream_options", "priority", "return_token_ids", "model")


def _prompt(generate: GenerateRequest) -> tuple[str, str | list[Any]]:
    """Return the name and value of the prompt field that is set. Raises `ApiError` 400 unless exactly one is."""
    prompts: dict[str, str | list[Any]] = {}
    for name in ("prompt", "text", "input_ids"):
        if (value := getattr(generate, name)) is not None and value not in prompts.values():
            prompts[name] = value
    if len(prompts) != 1:
        given = " and ".join(prompts) or "none"
        raise wrong("prompt", f"give one of prompt, text and input_ids (got {given})")
    return prompts.popitem()


def _merged(
    generate: GenerateRequest, params: GenerateSampling | None, place: str
) -> tuple[GenerateSampling, dict[str, str]]:
    """Merge `sampling_params` and top-level fields under the names of `Sampling`; also return the client's name of
    each. Raises `ApiError` for a field given twice with different values."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for prefix, body in ((place, params), ("", generate)):
        for given in GenerateSampling.model_fields if body is not None else ():
            if (value := getattr(body, given)) is None:
                continue
            name, written = GenerateSampling.NAMES.get(given, given), prefix + given
            if name in values and values[name] != value:
                raise bad_value(written, value, f"differs from {names[name]}, which is {values[name]!r:.80}: give one")
            values[name] = value
            names[name] = written
    return GenerateSampling.model_construct(**values), names


@contextlib.contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Convert a `ParamError` raised inside into an `ApiError` that names the field as the client wrote it."""
    try:
        yield
    except ParamError as error:
        name, dot, place = error.field.partition(".")
        written = names.get(name, name) + dot + place
        text = written + str(error).removeprefix(error.field)
        raise ApiError(400, text, param=written, code="invalid_value") from error


def _end(generation: Generation, finish_reason: str | None) -> dict[str, Any]:
    return {"finish_reason": finish_reason, **final_fields(generation, 0), "usage": generation.usage()}


class GenerateFormatter(Formatter):
    media_type = b"application/x-ndjson"

    def __init__(self, fields: GenerateSampling, wanted: GenerationInput) -> None:
        super().__init__(wanted, fields.stream, fields.priority)
        self._continuous_usage = fields.continuous_usage
        self._with_token_ids = bool(fields.return_token_ids)
        # fields for the next line
        self._more: dict[str, Any] = {"prompt_token_ids": wanted.prompts[0].tolist()} if self._with_token_ids else {}

    def for_gateway(self) -> GatewayFormat | None:
        return None if self._with_token_ids or self._continuous_usage else GatewayFormat("generate")

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        [choice] = choices
        done = _end(generation, choice.finish_reason)
        return {"text": choice.text, "token_ids": generation.token_ids(0), **done, **self._more}

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        lines = []
        for delta in deltas:
            if self._with_token_ids:
                self._more["token_ids"] = generation.new_token_ids(0)
            if self._continuous_usage:
                self._more["usage"] = generation.usage()
            if delta.text or self._more.get("token_ids"):
                lines.append(json_line({"text_delta": delta.text, **self._more}))
                self._more = {}
        if (reason := deltas[-1].finish_reason) is not None:
            lines.append(json_line({"event": "done", **_end(generation, reason)}))
        return b"".join(lines)

    def ping(self) -> bytes:
        return LINE_PING

    def end(self, generation: Generation) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return json_line(error.body)
