"""Decides the adapter, the seed and the maximum lengths with which a request is submitted to the engine.

Invariants: both front ends (Python and the gateway) use this code, so that a request reaches the engine with the same
parameters whichever of them writes its response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from minisgl.frontend.output_processor import Before
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import BOUNDS, SamplingParams
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import bad_value
from minisgl.server.core.lengths import Lengths, lengths
from minisgl.server.core.receipts import ReceiptBuilder
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.resume import fingerprint
from minisgl.server.core.sight import Seen, shown_ids
from minisgl.step import Int32Array

if TYPE_CHECKING:
    from minisgl.tokenizer.reference import Formats

MANY_LOGPROBS = 4096  # formatting this many takes about 10 ms


@dataclass(slots=True, eq=False)
class GenerationInput:
    """Input of one generation request, whichever API it came by. `has_client_limit`: the client set
    `sampling.max_tokens`. `only_prompt`: drop the one token that is generated. `shown`: ids of special tokens that are
    part of the text. `ignored`: fields without effect on this model. `rid`: client-chosen id for /abort_request.
    `images`: those of each prompt; empty: of none. `marker_id` is shown for their virtual ids."""

    prompts: Sequence[Int32Array]
    sampling: SamplingParams
    has_client_limit: bool = True
    only_prompt: bool = False
    shown: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = ()
    priority: int = 0
    rid: str | None = None
    receipts: ReceiptBuilder | None = None
    by_prompt: Sequence[SamplingParams] | None = None  # if they differ by prompt; `n` and log probabilities are equal
    images: Sequence[tuple[PromptImage, ...]] = ()
    marker_id: int = 0

    def take_images(self, seen: Sequence[Seen | None]) -> None:
        """Set the images by prompt, after `Prompts.encode` with the same `seen`."""
        if markers := [one.marker_id for one in seen if one is not None]:
            self.images = [() if one is None else one.images for one in seen]
            self.marker_id = markers[0]

    def shown_ids(self, at: int) -> list[int]:
        """Return a prompt's token ids for clients."""
        ids: list[int] = shown_ids(self.prompts[at], self.marker_id).tolist()
        return ids

    def formats(self) -> Formats | None:
        """Return the formats that split the output into reasoning, tool calls and text. `None`: all of it is text."""
        return None


@dataclass(frozen=True, slots=True)
class Admission:
    """Parameters with which a request goes to the engine. `sampling` and `by_prompt` have the adapter and the seed;
    `before`: tokens of another server, by choice; `is_large`: more than `MANY_LOGPROBS` log probabilities."""

    sampling: SamplingParams
    by_prompt: list[SamplingParams] | None
    lengths: Lengths
    before: list[Before] | None
    is_large: bool

    @classmethod
    def of(cls, context: ServerContext, request: HttpRequest, wanted: GenerationInput) -> Admission:
        """Check limits and admit a request. Raises `ApiError`: 400 for a value that is not allowed, 404 if the adapter
        was unloaded, 429 if the queue is full."""
        prompts, sampling = wanted.prompts, wanted.sampling
        context.keys.check_priority(request.key, wanted.priority)
        context.check_room(len(prompts), sum(map(len, prompts)), sampling.n, request.key)
        context.check_images(wanted.images)
        model = request.model or context.served.name
        sampling = context.served.sampling_for(sampling, model)
        resumable = request.resumable
        if resumable is not None:
            sampling = resumable.seeded(
                sampling, fingerprint(model, context.info, context.config.images.max_image_tokens)
            )
        limits = _limits(context, request, wanted, sampling)
        limits, is_large = _limit_by_logprobs(limits, prompts, sampling, named=wanted.has_client_limit)
        if limits.are_shortened:
            context.metrics.shortened(len(prompts) * sampling.n)
            request.shortened_to = limits.shown()
        before = None
        if resumable is not None:
            before = resumable.before(limits.by_prompt, sampling.n, context.info.vocab_size)
        by_prompt = None if wanted.by_prompt is None else [_completed(one, sampling) for one in wanted.by_prompt]
        return cls(sampling, by_prompt, limits, before, is_large)


def _completed(one: SamplingParams, sampling: SamplingParams) -> SamplingParams:
    """Return one prompt's sampling parameters with the request's adapter and, if it has no seed, its seed."""
    seed = sampling.seed if one.seed is None else one.seed
    return msgspec.structs.replace(one, adapter=sampling.adapter, seed=seed)


def _limits(context: ServerContext, request: HttpRequest, wanted: GenerationInput, sampling: SamplingParams) -> Lengths:
    """Return the maximum number of tokens to generate, by prompt."""
    room = [context.info.max_seq_len - len(prompt) for prompt in wanted.prompts]
    longest = partial(
        lengths, limits=context.limits, num_in_flight=context.queue.num_in_flight, named=wanted.has_client_limit
    )
    if wanted.by_prompt is None:
        limits = longest(room, sampling)
    else:
        each = [longest([left], one) for left, one in zip(room, wanted.by_prompt, strict=True)]
        limits = Lengths([one.by_prompt[0] for one in each], any(one.are_shortened for one in each))
    if request.resumable is None:
        return limits
    return Lengths(request.resumable.lengths(limits.by_prompt, room), limits.are_shortened)


def _limit_by_logprobs(
    limits: Lengths, prompts: Sequence[Int32Array], sampling: SamplingParams, *, named: bool
) -> tuple[Lengths, bool]:
    """Shorten default lengths so that log probabilities stay within `BOUNDS.max_logprob_entries`. Return the lengths
    and whether there are more than `MANY_LOGPROBS` log probabilities. A length that the client `named` is not
    shortened. Raises `ApiError` 400 if there would be too many."""
    of_prompts = 0 if sampling.prompt_logprobs is None else sum(map(len, prompts)) * (1 + sampling.prompt_logprobs)
    each = 0 if sampling.logprobs is None else 1 + sampling.logprobs
    by_prompt, n = limits.by_prompt, sampling.n
    if each and not named:
        most = (BOUNDS.max_logprob_entries // n - of_prompts) // (each * len(prompts))
        by_prompt = [max(1, min(length, most)) for length in by_prompt]
    count = n * (of_prompts + each * sum(by_prompt))
    if count > BOUNDS.max_logprob_entries:
        field = "prompt_logprobs" if of_prompts > each * sum(by_prompt) else "logprobs"
        raise bad_value(
            field,
            getattr(sampling, field),
            f"n * max_tokens (and prompt tokens, with prompt_logprobs) * (1 + top log probabilities) gives {count} log "
            f"probabilities: at most {BOUNDS.max_logprob_entries} are allowed in one request",
        )
    return Lengths(by_prompt, limits.are_shortened), count > MANY_LOGPROBS
