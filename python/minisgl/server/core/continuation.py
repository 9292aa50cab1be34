"""Turns a completion request (text prompts, no conversation) of any API into the input of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.sampling_params import BOUNDS, RANGES, SamplingParams
from minisgl.server.core.admission import GenerationInput
from minisgl.server.core.bodies import CompletionRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import bad_value, param_errors
from minisgl.server.core.lengths import asked_limit
from minisgl.server.core.sight import Seen


async def continuation(
    context: ServerContext,
    completion: CompletionRequest,
    *,
    has_gap: bool | None = None,
    seen: Sequence[Seen | None] = (),
) -> Continuation:
    """Check a completion request and encode its prompts. `has_gap`: whether the output fills a gap before the suffix
    (fill-in-the-middle); by default, if there is a suffix. `seen`: images by prompt. Raises `ApiError`."""
    with param_errors():
        limit, only_prompt = asked_limit("max_tokens", completion.max_tokens, BOUNDS.completion_tokens)
        sampling = _sampling(completion, limit, context.served.defaults)
        sampling, left_out = await context.prompts.with_grammar(sampling, completion.grammar_source())
    given = completion.prompts()
    whole, suffix = given, completion.suffix or ""
    if bool(suffix) if has_gap is None else has_gap:
        whole, sampling = await _fill_in_prompts(context, completion, suffix, sampling)
    prompts, sampling = await context.prompts.encode(
        whole, sampling, completion.truncate_prompt_tokens, side=completion.truncation_side, seen=seen
    )
    has_client_limit = completion.max_tokens is not None
    wanted = Continuation(prompts, sampling, has_client_limit, only_prompt, ignored=left_out, given=given)
    wanted.take_images(seen)
    return wanted


async def _fill_in_prompts(
    context: ServerContext, completion: CompletionRequest, suffix: str, sampling: SamplingParams
) -> tuple[list[str | list[int]], SamplingParams]:
    """Return fill-in-the-middle prompts as token ids, and `sampling` with the stop tokens that end the filled gap."""
    for name in ("echo", "truncate_prompt_tokens"):
        if value := getattr(completion, name):
            raise bad_value(name, value, "cannot be combined with suffix")
    texts = [prompt for prompt in completion.prompts() if isinstance(prompt, str)]
    if len(texts) < len(completion.prompts()):
        raise bad_value("suffix", suffix, "needs a text as the prompt, not token ids")
    filled, end_ids = await context.prompts.fill_in(texts, suffix)
    ends = tuple(dict.fromkeys((*sampling.stop_token_ids, *end_ids)))
    return list(filled), msgspec.structs.replace(sampling, stop_token_ids=ends)


@dataclass(slots=True, eq=False, kw_only=True)
class Continuation(GenerationInput):
    """Generation request with text prompts. `given`: as the client wrote them. `sampling.n` is `best_of`."""

    given: list[str | list[int]]


def _sampling(completion: CompletionRequest, limit: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
    n = 1 if completion.n is None else completion.n
    best_of = n if completion.best_of is None else completion.best_of
    if best_of < n:
        raise bad_value("best_of", best_of, f"must be at least n, which is {n}")
    if not RANGES["n"].has(best_of):
        raise bad_value("n" if completion.best_of is None else "best_of", best_of, RANGES["n"].words)
    if best_of > n and completion.stream:
        raise bad_value("best_of", best_of, "must equal n in a stream: the best choices are known only at its end")
    logprobs, of_prompt = completion.logprobs, completion.prompt_logprobs
    if of_prompt is None and completion.echo:
        of_prompt = logprobs
    if logprobs is None and best_of > n:
        logprobs = 0  # the best choices are selected by log probability
    return completion.to_sampling(limit, defaults, n=best_of, logprobs=logprobs, prompt_logprobs=of_prompt)
