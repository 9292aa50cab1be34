"""What one HTTP request adds to its requests in the engine: prompts times n choices, a timeout, pauses, usage.

Invariants: leaving the `with` block aborts whatever still runs; deltas of all choices come by one call, in the turn of
the event loop in which their tokens came, without waking a task; while it is paused, tokens stay where they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.frontend.engine_client import EngineGone
from minisgl.frontend.output_processor import Delta, Logprob, RequestState, Subscriber
from minisgl.message import GRAMMAR_REFUSED, TokenLogprobs
from minisgl.receipt import Receipt
from minisgl.sampling_params import BOUNDS, SamplingParams
from minisgl.server.core.context import Running, ServerContext
from minisgl.server.core.errors import ApiError, bad_value, engine_error, engine_gone, grammar_refused, too_late
from minisgl.server.core.lengths import Lengths, lengths
from minisgl.server.core.receipts import OfAnswers
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.resume import Tokens, fingerprint
from minisgl.step import FinishReason, Int32Array

if TYPE_CHECKING:
    from minisgl.tokenizer.reference import Formats

MANY_LOGPROBS = 4096  # as many are formatted in some 10 ms
_ERROR = FinishReason.ERROR
_NO_LOGPROBS = TokenLogprobs(0, 0.0, (), ())  # of what was shown elsewhere


@dataclass(slots=True, eq=False)
class Wanted:
    """One call of the model, whichever API asks for it. `names_length`: `sampling.max_tokens` is the client's, no
    default. `only_prompt`: the token that comes is dropped. `shown`: special tokens that are part of the text.
    `ignored`: fields that have no effect on this model. `rid`: whoever knows it may end this."""

    prompts: Sequence[Int32Array]
    sampling: SamplingParams
    names_length: bool = True
    only_prompt: bool = False
    shown: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = ()
    priority: int = 0
    rid: str | None = None
    receipts: OfAnswers | None = None
    by_prompt: Sequence[SamplingParams] | None = None  # where they differ, but not in `n` and what is reported

    def formats(self) -> Formats | None:
        """Return how the answer is taken apart; None: it is its text."""
        return None


def resolved(context: ServerContext, request: HttpRequest, wanted: Wanted) -> tuple[SamplingParams, Lengths, bool]:
    """Return what the engine gets of a call, whichever front end writes the answer: `wanted.sampling` with its adapter,
    the limits of lengths, and whether log probabilities are many. The server has room for it then. Raises `ApiError`:
    400, 404 for an adapter that has gone, 429 if too much waits already."""
    prompts, sampling = wanted.prompts, wanted.sampling
    context.keys.check_priority(request.key, wanted.priority)
    context.check_room(len(prompts), sum(map(len, prompts)), sampling.n, request.key)
    model = request.model or context.served.name
    sampling = context.served.sampling_for(sampling, model)
    resumable = request.resumable
    if resumable is not None:
        sampling = resumable.seeded(sampling, fingerprint(model, context.info))
    room = [context.info.max_seq_len - len(prompt) for prompt in prompts]
    longest = partial(lengths, limits=context.limits, num_in_flight=context.queue.num_in_flight)
    if wanted.by_prompt is None:
        found = longest(room, sampling, named=wanted.names_length)
    else:
        each = [
            longest([left], one, named=wanted.names_length) for left, one in zip(room, wanted.by_prompt, strict=True)
        ]
        found = Lengths([one.by_prompt[0] for one in each], any(one.are_shortened for one in each))
    if resumable is not None:
        found = Lengths(resumable.lengths(found.by_prompt, room), found.are_shortened)
    found, is_large = _with_room_for_logprobs(found, prompts, sampling, named=wanted.names_length)
    if found.are_shortened:
        context.metrics.shortened(len(prompts) * sampling.n)
        request.shortened_to = found.shown()
    return sampling, found, is_large


class Generation:
    """Prompts times `sampling.n` choices; choice i * n + j belongs to prompt i."""

    def __init__(self, context: ServerContext, request: HttpRequest, wanted: Wanted) -> None:
        """Submit to the engine. Raises `ApiError` 429 if too much waits already."""
        prompts = wanted.prompts
        sampling, found, self.is_large = resolved(context, request, wanted)
        num_prompt_tokens = sum(map(len, prompts))
        self._run_in_lane = context.prompts.run
        self._client = context.client
        self._metrics = context.metrics
        self._request = request
        in_background = request.submitted is not None
        self._timeout_s = None if in_background else context.limits.request_timeout
        self._first: asyncio.Future[list[Delta]] | None = None  # while `first` waits
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(_seen)  # a failure may come with nobody waiting
        self._sink: Callable[[list[Delta]], None] | None = None
        self._is_paused = False
        self._n = sampling.n
        self._only_prompt = wanted.only_prompt
        self._timer: asyncio.TimerHandle | None = None
        self._is_replaying = False
        self._keys = context.keys
        self._receipts = wanted.receipts
        self._prompt_tokens: dict[int, list[Logprob]] = {}  # by prompt, with log probabilities
        max_seq_len, subscriber = context.info.max_seq_len, Subscriber(self.notify)
        before = None
        if request.resumable is not None:
            before = request.resumable.before(found.by_prompt, sampling.n, context.info.vocab_size)
        self._lengths = found
        by_prompt = None
        if wanted.by_prompt is not None:
            seeds = [sampling.seed if one.seed is None else one.seed for one in wanted.by_prompt]
            by_prompt = [
                msgspec.structs.replace(one, adapter=sampling.adapter, seed=seed)
                for one, seed in zip(wanted.by_prompt, seeds, strict=True)
            ]
        try:
            self._states = context.client.submit(
                prompts,
                sampling,
                context.tokenizer,
                max_seq_len,
                subscriber,
                wanted.priority,
                lengths=found.by_prompt,
                by_prompt=by_prompt,
                key=request.key,
                shown=wanted.shown,
                formats=wanted.formats(),
                before=before,
                background=in_background,
            )
        except EngineGone as error:
            raise engine_gone(str(error)) from error
        self._open = list(self._states)
        self._running, self._entry = context.running, set[Running]()
        if wanted.rid is not None:
            self._entry.add((request.key, wanted.rid, self.end_early))
            self._running |= self._entry
        self._metrics.accepted(len(self._states))
        self._keys.accepted(request.key, len(self._states), num_prompt_tokens)
        request.prompt_tokens = num_prompt_tokens * sampling.n
        if request.submitted is not None:
            request.submitted.set()
        if self._timeout_s is not None:
            left_s = request.arrival_time + self._timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()
        self._running -= self._entry
        self._entry.clear()  # it knows this, as the next two do: cycles wait for the collector
        self._states, self._open, self._sink = [], [], None

    def _expire(self) -> None:
        """Free the engine now: whoever sends the error may still be waiting for a slow client."""
        for state in self._states:
            self._client.abort(state)
        self._fail(too_late(self._timeout_s or 0.0))

    def end_early(self) -> None:
        """Every choice ends with what it has."""
        for state in self._open:
            if not state.reason:
                self._client.abort(state)
                state.reason = FinishReason.ABORT
        self.notify()

    def abort(self) -> None:
        """End what still runs. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for state in self._open:
            if state.finish_reason is None:  # else it ended in the turn in which another one failed
                self._client.abort(state)
                self._end(state, "abort")
        self._open = []

    def _end(self, state: RequestState, reason: str) -> None:
        since = self._request.arrival_time if self._request.submitted is None else None
        self._metrics.finished(reason, since, len(state.prompt), len(state.token_ids))
        self._request.finish_reasons.append(reason)
        self._request.cached_tokens += state.cached_len or 0

    # ------------------------------------------------------------------------------------------------------ deltas

    async def first(self, wait_s: float | None = None) -> list[Delta]:
        """Return what comes first, or next; nothing if it takes longer than `wait_s`. Raises `ApiError` if a choice
        fails before."""
        if self._ended.done():
            self._ended.result()
        first: asyncio.Future[list[Delta]] = asyncio.get_running_loop().create_future()
        self._first = first
        self.notify()  # it may be there already
        if wait_s is None or first.done():
            return await first
        timer = asyncio.get_running_loop().call_later(wait_s, self._pass_on, [])
        try:
            return await first
        finally:
            timer.cancel()

    async def stream(
        self, first: list[Delta], chunk: Callable[[Generation, list[Delta]], bytes], write: Callable[[bytes], None]
    ) -> None:
        """`write` the chunks of `first` and of all that comes after it, as it comes. Raises as `_follow`."""

        def sink(deltas: list[Delta]) -> None:
            write(chunk(self, deltas))

        if first:  # nothing is, if another server has sent it
            sink(first)
        await self._follow(sink)

    async def stream_from_lane(
        self, first: list[Delta], chunk: Callable[[Generation, list[Delta]], bytes], write: Callable[[bytes], None]
    ) -> None:
        """`stream`, with its chunks made in the lane of long work: others are served meanwhile."""
        deltas = first
        while deltas or self._open:
            write(await self._run_in_lane(partial(chunk, self, deltas or await self.first())))
            deltas = []

    def replay(self, turns: Sequence[Sequence[Tokens]], show: Callable[[Generation, list[Delta]], object]) -> None:
        """Take once more what came on another server, in the same turns, and `show` it to nobody. To be called before
        anything else comes."""
        self._is_replaying = True
        for turn in turns:
            for one in turn:
                state = self._states[one.index]
                state.tokens += one.tokens
                state.reason = FinishReason(one.reason)
                if state.sampling.logprobs is not None:
                    state.logprobs += [_NO_LOGPROBS] * len(one.tokens)
            if found := self._take(time.monotonic()):
                show(self, found)
        self._is_replaying = False
        sent = self._client.processor.live
        if any(state.req_id not in sent and state.finish_reason is None for state in self._states):
            raise ApiError(400, "x-minisgl-marks: what was said before: a choice has ended without a reason")

    async def _follow(self, sink: Callable[[list[Delta]], None]) -> None:
        """`sink` gets what came since `first` (or from the beginning), as it comes, until every choice has ended.
        Raises `ApiError` if one fails, and what `sink` raises."""
        self._sink = sink
        self.notify()
        await self._ended

    async def collect(self) -> list[Delta]:
        """Every choice whole. Raises `ApiError` if one fails."""
        deltas: list[list[Delta]] = [[] for _ in self._states]

        def sink(found: list[Delta]) -> None:
            for delta in found:
                deltas[delta.index].append(delta)

        await self._follow(sink)
        return [_joined(parts) for parts in deltas]

    def pause(self) -> None:
        """Nobody can take deltas now."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.notify()

    def notify(self) -> None:
        """Something came for one or more of the choices."""
        if self._is_paused or self._ended.done() or (self._sink is None and self._first is None):
            return
        try:
            if found := self._take(time.monotonic()):
                self._pass_on(found)
            if not self._open:
                self._ended.set_result(None)
        except Exception as error:  # the request's own task raises it: other subscribers are notified, too
            self._fail(error)

    def _pass_on(self, deltas: list[Delta]) -> None:
        if self._sink is not None:
            self._sink(deltas)
        elif self._first is not None:
            first, self._first = self._first, None
            if not first.done():
                first.set_result(deltas)

    def _fail(self, error: Exception) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        if not self._ended.done():
            self._ended.set_exception(error)

    def _take(self, now: float) -> list[Delta]:
        """What came since the last time."""
        found = []
        has_ended = False
        for state in self._open:
            if (delta := self._output(state, now)) is not None:
                found.append(delta)
                has_ended |= delta.finish_reason is not None
        if has_ended:
            self._open = [state for state in self._open if state.finish_reason is None]
        return found

    def _output(self, state: RequestState, now: float) -> Delta | None:
        if not (state.tokens or state.reason):
            return None  # of several choices, others have something
        if state.reason is _ERROR:
            self._open.remove(state)
            self._end(state, "error")
            raise _failure(state)
        num_before, num_tokens, began = len(state.token_ids), len(state.tokens), time.perf_counter_ns()
        delta = state.take()
        if self._only_prompt and delta is not None:
            state.token_ids.clear()
            delta = Delta(delta.index, "", delta.finish_reason and "length")
        self._metrics.detokenize.add(time.perf_counter_ns() - began, num_tokens)
        if state.found_stop:
            self._client.finish(state)
        if (num_new := len(state.token_ids) - num_before) > 0 and not self._is_replaying:
            self._count(state, num_new, now)
        if delta is not None:
            if self._receipts is not None:
                self._receipts.add(delta, was_elsewhere=self._is_replaying)
            if delta.finish_reason is not None:
                self._end(state, delta.finish_reason)
            self._request.add_output(delta.text)
        return delta

    def _count(self, state: RequestState, num_new: int, now: float) -> None:
        self._request.generated_tokens += num_new
        self._keys.generated(self._request.key, num_new)
        if self._request.ttft_s is None:
            self._request.ttft_s = now - self._request.arrival_time
        since = self._request.arrival_time if self._request.submitted is None else None
        self._metrics.tokens(num_new, since, state.last_time, now)
        state.last_time = now

    # ------------------------------------------------------------------------------------------- prompts and usage

    def prompt_tokens(self, index: int) -> list[Logprob]:
        """The prompt of a choice with its log probabilities, once its first token is there. All choices of a prompt
        have the same."""
        at = index // self._n
        if at not in self._prompt_tokens:
            self._prompt_tokens[at] = self._states[index].prompt_tokens()
            for state in self._states[at * self._n : (at + 1) * self._n]:
                state.prompt_logprobs = {}
        return self._prompt_tokens[at]

    def token_ids(self, index: int) -> list[int]:
        """Generated ids of a choice so far, its stop token included."""
        return self._states[index].token_ids

    def reason(self, index: int) -> int:
        """Why the engine ended a choice, a `FinishReason`."""
        return int(self._states[index].reason)

    def cached(self) -> list[int]:
        """How much of the prompt of each choice was in the cache."""
        return [state.cached_len or 0 for state in self._states]

    def matched_stop(self, index: int) -> str | int | None:
        """What of the request's own stops ended a choice: a stop string, or the id of a token."""
        state = self._states[index]
        last = state.token_ids[-1] if state.token_ids else None
        if state.reason is FinishReason.STOP and state.matched_stop is None:
            return last if last in state.sampling.stop_token_ids else None
        return state.matched_stop

    def receipt(self, index: int) -> Receipt | None:
        """The receipt of a choice that has ended, if the request asks for one."""
        return None if self._receipts is None else self._receipts.of(self._states[index])

    def embedding(self, index: int) -> bytes | None:
        """The embedding of the prompt of a choice that asked for one, float32."""
        return self._states[index].embedding

    def new_token_ids(self, index: int) -> list[int]:
        """Those that came since this was asked before."""
        return self._states[index].new_token_ids()

    def _of_prompts(self) -> list[RequestState]:
        """One choice of each."""
        return self._states[:: self._n]

    def headers(self, *, begins: bool = False) -> list[tuple[bytes, bytes]]:
        """Headers of the answer, which `begins` or is whole: the limit of its length, by prompt, and how much of its
        prompts was in the cache. While a stream of several prompts begins that is not known; so it is never said
        there."""
        found = [(b"x-minisgl-max-tokens", self._lengths.shown().encode())]
        cached = [state.cached_len for state in self._of_prompts()]
        if not begins or (len(cached) == 1 and cached[0] is not None):
            found.append((b"x-minisgl-cached-tokens", b"%d" % sum(one or 0 for one in cached)))
        return found

    def times_s(self, index: int) -> tuple[float, float]:
        """From the request's arrival to its first token, and from there to the last one of a choice."""
        first, arrival = self._request.ttft_s or 0.0, self._request.arrival_time
        last = self._states[index].last_time
        return first, 0.0 if last is None else max(0.0, last - arrival - first)

    def usage_of(self, index: int) -> dict[str, Any]:
        """The usage of one choice."""
        return _usage([self._states[index]], [self._states[index]])

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage: each prompt counts once, however many choices it has."""
        return _usage(self._of_prompts(), self._states)


def _usage(prompts: Sequence[RequestState], choices: Sequence[RequestState]) -> dict[str, Any]:
    num_prompt = sum(len(state.prompt) for state in prompts)
    num_generated = sum(len(state.token_ids) for state in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(state.cached_len or 0 for state in prompts)},
    }


def _with_room_for_logprobs(
    found: Lengths, prompts: Sequence[Int32Array], sampling: SamplingParams, *, named: bool
) -> tuple[Lengths, bool]:
    """Limits of lengths with which log probabilities stay within `BOUNDS.max_logprob_entries`, and whether they are
    many. A length that the client `named` is not cut. Raises `ApiError` 400."""
    of_prompts = 0 if sampling.prompt_logprobs is None else sum(map(len, prompts)) * (1 + sampling.prompt_logprobs)
    each = 0 if sampling.logprobs is None else 1 + sampling.logprobs
    by_prompt, n = found.by_prompt, sampling.n
    if each and not named:
        most = (BOUNDS.max_logprob_entries // n - of_prompts) // (each * len(prompts))
        by_prompt = [max(1, min(length, most)) for length in by_prompt]
    count = n * (of_prompts + each * sum(by_prompt))
    if count > BOUNDS.max_logprob_entries:
        field = "prompt_logprobs" if of_prompts > each * sum(by_prompt) else "logprobs"
        raise bad_value(
            field,
            getattr(sampling, field),
            f"n times max_tokens (and the prompt's tokens, with prompt_logprobs) times (1 + the most likely ones) are "
            f"{count} log probabilities: at most {BOUNDS.max_logprob_entries} in one request",
        )
    return Lengths(by_prompt, found.are_shortened), count > MANY_LOGPROBS


def _failure(state: RequestState) -> ApiError:
    text = state.error or "the engine gave no reason"
    if state.engine_gone:
        return engine_gone(text)
    return grammar_refused(text) if text.startswith(GRAMMAR_REFUSED) else engine_error(text)


def _joined(deltas: list[Delta]) -> Delta:
    logprobs = tuple(one for delta in deltas for one in delta.logprobs)
    return Delta(deltas[-1].index, "".join(delta.text for delta in deltas), deltas[-1].finish_reason, logprobs)


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
