"""Lifetime of a request in the engine, from submission to the end of its last choice: delivery of deltas, pauses,
timeout and accounting.

Invariants: leaving the `with` block aborts unfinished choices; deltas of all choices are delivered by one call, in the
turn of the event loop in which their tokens arrived, without waking a task; while paused, tokens stay undelivered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from minisgl.frontend.engine_client import EngineGone
from minisgl.frontend.output_processor import Delta, RequestState, Subscriber
from minisgl.message import GRAMMAR_REFUSED, TokenLogprobs
from minisgl.server.core.admission import Admission, GenerationInput
from minisgl.server.core.context import AbortEntry, ServerContext
from minisgl.server.core.errors import ApiError, engine_error, engine_gone, grammar_refused, too_late
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.resume import Tokens
from minisgl.step import FinishReason

_ERROR = FinishReason.ERROR
_NO_LOGPROBS = TokenLogprobs(0, 0.0, (), ())  # for tokens that another server sent


class UsageCounter:
    """Counts the usage of one HTTP request: in the metrics, for its API key and in its access line."""

    def __init__(self, context: ServerContext, request: HttpRequest) -> None:
        self._metrics, self._keys, self._request = context.metrics, context.keys, request
        # None for a batch line, whose times are no latencies
        self._since = request.arrival_time if request.submitted is None else None

    def accepted(self, num_choices: int, num_prompt_tokens: int, n: int) -> None:
        """Count a submitted request. `num_prompt_tokens`: of all its prompts together, each with `n` choices."""
        self._metrics.accepted(num_choices)
        self._keys.accepted(self._request.key, num_choices, num_prompt_tokens)
        self._request.prompt_tokens = num_prompt_tokens * n

    def decoded(self, began_ns: int, num_tokens: int) -> None:
        """Count the time of detokenizing `num_tokens`, from `began_ns` until now."""
        self._metrics.detokenize.add(time.perf_counter_ns() - began_ns, num_tokens)

    def generated(self, state: RequestState, num_new: int, now: float) -> None:
        """Count new tokens of a choice in the metrics, with their latencies (TTFT, ITL)."""
        request = self._request
        request.generated_tokens += num_new
        self._keys.generated(request.key, num_new)
        if request.ttft_s is None:
            request.ttft_s = now - request.arrival_time
        self._metrics.tokens(num_new, self._since, state.last_time, now)
        state.last_time = now

    def ended(self, state: RequestState, reason: str) -> None:
        """Count the end of a choice in the metrics and the access line, with its finish reason."""
        self._metrics.finished(reason, self._since, len(state.prompt), len(state.token_ids))
        self._request.finish_reasons.append(reason)
        self._request.cached_tokens += state.cached_len or 0


class Running:
    """Context manager of one submitted request. `generation` has its results so far."""

    def __init__(self, context: ServerContext, request: HttpRequest, wanted: GenerationInput) -> None:
        """Admit the request and submit it. Raises `ApiError` as `Admission.of`, and 503 if the engine has failed."""
        admission = Admission.of(context, request, wanted)
        self.is_large = admission.is_large
        self._run_in_lane = context.prompts.run
        self._client = context.client
        self._request = request
        self._account = UsageCounter(context, request)
        self._receipts = wanted.receipts
        self._only_prompt = wanted.only_prompt
        self._is_replaying = False
        self._is_paused = False
        self._first: asyncio.Future[list[Delta]] | None = None  # set while `first` waits
        self._sink: Callable[[list[Delta]], None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(_seen)  # a failure may arrive while no task waits
        self._open = _submitted(context, request, wanted, admission, Subscriber(self.notify))
        n = admission.sampling.n
        self.generation = Generation([*self._open], n, admission.lengths, request, wanted.receipts)
        self._may_end_early = context.abort_entries
        self._entry: AbortEntry | None = None
        if wanted.rid is not None:
            self._entry = (request.key, wanted.rid, self.end_early)
            self._may_end_early.add(self._entry)
        self._account.accepted(len(self._open), sum(map(len, wanted.prompts)), n)
        self._timer: asyncio.TimerHandle | None = None
        if request.submitted is not None:
            request.submitted.set()
        elif (timeout_s := context.limits.request_timeout) is not None:
            left_s = request.arrival_time + timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire, timeout_s)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()
        if self._entry is not None:
            self._may_end_early.discard(self._entry)
        # break reference cycles, which would wait for the collector
        self._entry, self._sink = None, None
        self.generation.choices = []

    def _expire(self, timeout_s: float) -> None:
        """Abort all choices and fail with a timeout. Frees the engine now: the client may read the error slowly."""
        for state in self.generation.choices:
            self._client.abort(state)
        self._fail(too_late(timeout_s))

    def end_early(self) -> None:
        """End every choice now with the output that it has; its finish reason is `abort`."""
        for state in self._open:
            if not state.reason:
                self._client.abort(state)
                state.reason = FinishReason.ABORT
        self.notify()

    def abort(self) -> None:
        """Abort all unfinished choices of the request. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for state in self._open:
            if state.finish_reason is None:  # else it ended in the same turn in which another one failed
                self._client.abort(state)
                self._account.ended(state, "abort")
        self._open = []

    # ----------------------------------------------------------------------------------------------- who gets deltas

    async def first(self, wait_s: float | None = None) -> list[Delta]:
        """Wait for the next deltas and return them; an empty list after `wait_s`. Raises `ApiError` if one fails."""
        if self._ended.done():
            self._ended.result()
        first: asyncio.Future[list[Delta]] = asyncio.get_running_loop().create_future()
        self._first = first
        self.notify()  # output may have arrived already
        if wait_s is None or first.done():
            return await first
        timer = asyncio.get_running_loop().call_later(wait_s, self._deliver, [])
        try:
            return await first
        finally:
            timer.cancel()

    async def stream(
        self, first: list[Delta], chunk: Callable[[Generation, list[Delta]], bytes], write: Callable[[bytes], None]
    ) -> None:
        """Write the chunk of `first`, then chunks of all later deltas as they arrive. Raises as `_follow`."""

        def sink(deltas: list[Delta]) -> None:
            write(chunk(self.generation, deltas))

        if first:  # empty if another server has sent it
            sink(first)
        await self._follow(sink)

    async def stream_from_lane(
        self, first: list[Delta], chunk: Callable[[Generation, list[Delta]], bytes], write: Callable[[bytes], None]
    ) -> None:
        """Write the same chunks as `stream`, formatted in the thread pool, so that other requests are not delayed."""
        deltas = first
        while deltas or self._open:
            write(await self._run_in_lane(partial(chunk, self.generation, deltas or await self.first())))
            deltas = []

    def replay(self, turns: Sequence[Sequence[Tokens]], show: Callable[[Generation, list[Delta]], object]) -> None:
        """Process tokens that another server generated, in the same groups, and call `show` with their deltas; its
        result is dropped. Call before any token arrives."""
        choices = self.generation.choices
        self._is_replaying = True
        for turn in turns:
            for one in turn:
                state = choices[one.index]
                state.tokens += one.tokens
                state.reason = FinishReason(one.reason)
                if state.sampling.logprobs is not None:
                    state.logprobs += [_NO_LOGPROBS] * len(one.tokens)
            if deltas := self._new_deltas(time.monotonic()):
                show(self.generation, deltas)
        self._is_replaying = False
        sent = self._client.processor.live
        if any(state.req_id not in sent and state.finish_reason is None for state in choices):
            raise ApiError(400, "x-minisgl-marks: the state before the body: a choice has ended without a reason")

    async def _follow(self, sink: Callable[[list[Delta]], None]) -> None:
        """Pass all deltas since `first` (or from the beginning) to `sink`, as they arrive, until every choice has
        ended. Raises `ApiError` if one fails, and what `sink` raises."""
        self._sink = sink
        self.notify()
        await self._ended

    async def collect(self) -> list[Delta]:
        """Wait for every choice to end; return one delta per choice with all output. Raises `ApiError` if one fails."""
        deltas: list[list[Delta]] = [[] for _ in self.generation.choices]

        def sink(new: list[Delta]) -> None:
            for delta in new:
                deltas[delta.index].append(delta)

        await self._follow(sink)
        return [_joined(parts) for parts in deltas]

    def pause(self) -> None:
        """Stop delivering deltas until `resume`: the client does not read."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.notify()

    def notify(self) -> None:
        """Deliver new output, if any. Called when output of a choice has arrived."""
        if self._is_paused or self._ended.done() or (self._sink is None and self._first is None):
            return
        try:
            if deltas := self._new_deltas(time.monotonic()):
                self._deliver(deltas)
            if not self._open:
                self._ended.set_result(None)
        except Exception as error:  # the request's own task raises it: other subscribers are notified, too
            self._fail(error)

    def _deliver(self, deltas: list[Delta]) -> None:
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

    # --------------------------------------------------------------------------------------------------- what came

    def _new_deltas(self, now: float) -> list[Delta]:
        """Return the deltas since the last call, one for each choice with new output."""
        deltas = []
        has_ended = False
        for state in self._open:
            if (delta := self._output(state, now)) is not None:
                deltas.append(delta)
                has_ended |= delta.finish_reason is not None
        if has_ended:
            self._open = [state for state in self._open if state.finish_reason is None]
        return deltas

    def _output(self, state: RequestState, now: float) -> Delta | None:
        if not (state.tokens or state.reason):
            return None  # only other choices have output
        if state.reason is _ERROR:
            self._open.remove(state)
            self._account.ended(state, "error")
            raise _failure(state)
        num_before, num_tokens, began_ns = len(state.token_ids), len(state.tokens), time.perf_counter_ns()
        delta = state.take()
        if self._only_prompt and delta is not None:
            state.token_ids.clear()
            delta = Delta(delta.index, "", delta.finish_reason and "length")
        self._account.decoded(began_ns, num_tokens)
        if state.found_stop:
            self._client.finish(state)
        if (num_new := len(state.token_ids) - num_before) > 0 and not self._is_replaying:
            self._account.generated(state, num_new, now)
        if delta is not None:
            if self._receipts is not None:
                self._receipts.add(delta, was_elsewhere=self._is_replaying)
            if delta.finish_reason is not None:
                self._account.ended(state, delta.finish_reason)
            self._request.add_output(delta.text)
        return delta


def _submitted(
    context: ServerContext, request: HttpRequest, wanted: GenerationInput, admission: Admission, subscriber: Subscriber
) -> list[RequestState]:
    """Submit a request to the engine and return its choices' state. Raises `ApiError` 503 if the engine failed."""
    try:
        return context.client.submit(
            wanted.prompts,
            admission.sampling,
            context.tokenizer,
            context.info.max_seq_len,
            subscriber,
            wanted.priority,
            lengths=admission.lengths.by_prompt,
            by_prompt=admission.by_prompt,
            key=request.key,
            shown=wanted.shown,
            formats=wanted.formats(),
            before=admission.before,
            background=request.submitted is not None,
            images=wanted.images,
        )
    except EngineGone as error:
        raise engine_gone(str(error)) from error


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
