"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.sampling_params import MAX_N, SamplingParams
from minisgl.server.bodies import CompletionRequest
from minisgl.server.context import ServerContext, checked
from minisgl.server.errors import ApiError, bad_value
from minisgl.server.generation import Generation
from minisgl.server.intake import Payload
from minisgl.server.logprobs import CompletionLogprobs, EchoedPrompt, echoed_prompt, prompt_logprobs
from minisgl.server.record import RequestRecord
from minisgl.server.transport import SSE_DONE, StreamResponse, json_response, sse, sse_error
from minisgl.step import Int32Array


async def answer_completion(context: ServerContext, request: Request, body: Payload, record: RequestRecord) -> Response:
    completion = await context.parse(body, CompletionRequest)
    context.check_model(completion.model)
    options, sampling = _options(completion, context.defaults)
    context.check_vocabulary(sampling)
    sampling = await context.with_bad_token_ids(sampling)
    given = completion.prompts()
    keep = context.num_kept(completion.truncate_prompt_tokens, sampling.max_tokens)
    prompts = await context.encode_prompts(given, "prompt", keep)

    body.done()
    begin = partial(context.generation, prompts, sampling, record, priority=completion.priority or 0)
    answer = _Answer(context, begin, options, given, prompts)
    if completion.stream:
        return StreamResponse(answer, "text/event-stream")
    with begin() as generation:
        return json_response(await answer.collect(generation))


@dataclass(frozen=True, slots=True)
class _Options:
    n: int
    best_of: int  # generated, of which the best n are returned
    echo: bool
    only_prompt: bool  # max_tokens 0 with echo: one token is computed and dropped
    with_logprobs: bool
    with_prompt_logprobs: bool
    include_usage: bool  # in a stream
    continuous_usage: bool
    with_token_ids: bool


def _options(completion: CompletionRequest, defaults: Mapping[str, Any]) -> tuple[_Options, SamplingParams]:
    n = 1 if completion.n is None else completion.n
    best_of = n if completion.best_of is None else completion.best_of
    if best_of < n:
        raise bad_value("best_of", best_of, f"must be at least n, which is {n}")
    if best_of > MAX_N:
        raise bad_value("n" if completion.best_of is None else "best_of", best_of, f"must be at most {MAX_N}")
    if best_of > n and completion.stream:
        raise bad_value("best_of", best_of, "must equal n in a stream: the best are known at the end")
    echo = bool(completion.echo)
    limit = completion.DEFAULT_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    only_prompt = echo and limit == 0
    logprobs = completion.logprobs
    of_prompt = completion.prompt_logprobs
    if of_prompt is None and echo:
        of_prompt = logprobs
    sampling = checked(
        lambda: completion.to_sampling(
            1 if only_prompt else limit,
            defaults,
            n=best_of,
            logprobs=0 if logprobs is None and best_of > n else logprobs,  # what the best are chosen by
            prompt_logprobs=of_prompt,
        )
    )
    options = _Options(
        n=n,
        best_of=best_of,
        echo=echo,
        only_prompt=only_prompt,
        with_logprobs=logprobs is not None,
        with_prompt_logprobs=completion.prompt_logprobs is not None,
        include_usage=completion.include_usage,
        continuous_usage=completion.continuous_usage,
        with_token_ids=bool(completion.return_token_ids),
    )
    return options, sampling


class _Answer:
    """Whole, or as the `Pieces` of a stream."""

    def __init__(
        self,
        context: ServerContext,
        begin: Callable[[], Generation],
        options: _Options,
        given: Sequence[str | list[int]],
        prompts: Sequence[Int32Array],
    ) -> None:
        self.begin = begin
        self._tokenizer = context.tokenizer
        self._options = options
        self._pieces: dict[int, _Piece] = {}  # of a stream, by choice
        self._given = given
        self._echoed: dict[int, EchoedPrompt] = {}  # by prompt
        self._prompts = prompts
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model_name,
        }

    async def collect(self, generation: Generation) -> dict[str, Any]:
        options = self._options
        found = await generation.collect()
        choices: list[dict[str, Any]] = []
        for prompt in range(len(self._prompts)):
            first = prompt * options.best_of
            for at in _best(found[first : first + options.best_of], options.n):
                one = found[first + at]
                piece = _Piece(first + at, len(choices), CompletionLogprobs(self._tokenizer))
                choices.append(self._choice(piece, generation, one.text, one.logprobs, one.finish_reason))
        return {**self._head, "choices": choices, "usage": self._usage(generation)}

    # ------------------------------------------------------------------------------------------------------ pieces

    def piece(self, generation: Generation, deltas: list[Delta]) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._options.include_usage else {}
        if self._options.continuous_usage:
            usage["usage"] = self._usage(generation)
        frames = []
        for delta in deltas:
            if (piece := self._pieces.get(delta.index)) is None:
                logprobs = CompletionLogprobs(self._tokenizer)
                piece = self._pieces[delta.index] = _Piece(delta.index, delta.index, logprobs)
            choice = self._choice(piece, generation, delta.text, delta.logprobs, delta.finish_reason)
            frames.append(sse({**self._head, "choices": [choice], **usage}))
        return b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        if not self._options.include_usage:
            return SSE_DONE
        return sse({**self._head, "choices": [], "usage": self._usage(generation)}) + SSE_DONE

    def error(self, error: ApiError) -> bytes:
        return sse_error(error)

    # ----------------------------------------------------------------------------------------------------- choices

    def _choice(
        self, piece: _Piece, generation: Generation, text: str, tokens: Sequence[Logprob], finish_reason: str | None
    ) -> dict[str, Any]:
        """The next part of a choice; what concerns the prompt comes with the first."""
        options, more = self._options, dict[str, Any]()
        echoed, of_prompt = None, list[Logprob]()
        if options.only_prompt:
            text, tokens = "", ()
            finish_reason = finish_reason and "length"
        if piece.is_first:
            piece.is_first = False
            if options.with_prompt_logprobs:
                prompt = generation.prompt_tokens(piece.source)
                more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt)
            if options.with_token_ids:
                more["prompt_token_ids"] = self._prompts[piece.source // options.best_of].tolist()
            if options.echo:
                echoed = self._prompt(piece.source)
                text = echoed.text + text
                if options.with_logprobs:
                    of_prompt = generation.prompt_tokens(piece.source)
        logprobs = piece.logprobs.piece(tokens, echoed, of_prompt) if options.with_logprobs else None
        if options.with_token_ids:
            more["token_ids"] = [] if options.only_prompt else generation.new_token_ids(piece.source)
        return {
            "index": piece.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **more,
        }

    def _prompt(self, index: int) -> EchoedPrompt:
        at = index // self._options.best_of
        if at not in self._echoed:
            given = self._given[at]
            text = given if isinstance(given, str) else None
            ids, with_offsets = self._prompts[at].tolist(), self._options.with_logprobs
            self._echoed[at] = echoed_prompt(self._tokenizer, text, ids, with_offsets=with_offsets)
        return self._echoed[at]

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage()
        if self._options.only_prompt:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage


@dataclass(slots=True, eq=False)
class _Piece:
    """How far a choice has come: `source` is its index in the generation, `index` that in the answer."""

    source: int
    index: int
    logprobs: CompletionLogprobs
    is_first: bool = True


def _best(choices: Sequence[Delta], n: int) -> list[int]:
    """Indices of the n choices with the highest log probability per token, in their own order."""
    if n == len(choices):
        return list(range(n))

    def mean(at: int) -> float:
        logprobs = [token.logprob or 0.0 for token in choices[at].logprobs]
        return sum(logprobs) / max(1, len(logprobs))

    return sorted(sorted(range(len(choices)), key=mean, reverse=True)[:n])
