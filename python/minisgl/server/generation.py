"""One HTTP request's generations: prompts times n choices, from tokens to text deltas and usage.

Keeps true: leaving the `with` block aborts whatever still runs; deltas of all choices come by one call, in the turn of
the event loop in which their tokens came, without waking a task; while it is held, tokens stay where they are.
Doesn't know: OpenAI's shapes, transports.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from minisgl.message import TokenLogprobs
from minisgl.metrics.server_metrics import Metrics
from minisgl.sampling_params import SamplingParams, choice_seed
from minisgl.server.engine_client import EngineClient, EngineGone, RequestHandle, resolve
from minisgl.server.errors import ApiError, engine_error, engine_gone
from minisgl.server.limits import too_late
from minisgl.server.record import RequestRecord
from minisgl.step import FinishReason, Int32Array
from minisgl.tokenizer import TextStream, Tokenizer

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probability (None for the first of a prompt) and the most likely ones in its place."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice; `finish_reason` with the last one."""

    index: int
    text: str
    finish_reason: str | None
    tokens: tuple[ScoredToken, ...] = ()  # of the text; only for requests with logprobs


class _Choice:
    __slots__ = ("done", "handle", "last_time", "num_tokens", "num_told", "stream", "token_ids")

    def __init__(self, handle: RequestHandle, stream: TextStream) -> None:
        self.handle = handle
        self.stream = stream
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.num_told = 0  # of them, by `new_token_ids`
        self.done = False
        self.last_time: float | None = None


class Generation:
    """`prompts` times `sampling.n` choices; choice i * n + j belongs to prompt i."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        prompts: Sequence[Int32Array],
        sampling: SamplingParams,
        *,
        max_seq_len: int,
        record: RequestRecord,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._record = record
        self._timeout_s = timeout_s
        self._expired = False
        self.is_told = False  # the client's, see its `Listener`
        self._first: asyncio.Future[list[Delta]] | None = None  # while `first` waits
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(_seen)  # a failure may come with nobody waiting
        self._sink: Callable[[list[Delta]], None] | None = None
        self._is_held = False
        self._prompts = prompts
        self._n = sampling.n
        self._sampling = sampling
        self._choices: list[_Choice] = []
        self._open: list[tuple[int, _Choice]] = []
        self._timer: asyncio.TimerHandle | None = None
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        try:
            for prompt in prompts:
                left = max_seq_len - len(prompt)
                max_tokens = left if sampling.max_tokens is None else min(sampling.max_tokens, left)
                for j in range(sampling.n):
                    resolved = resolve(sampling, choice_seed(seed, j), max_tokens)
                    handle = client.submit(prompt, resolved, self, priority)
                    self._choices.append(_Choice(handle, TextStream(tokenizer, sampling.stop)))
        except EngineGone as error:
            self.abort()
            raise engine_gone(str(error)) from error
        self._open = list(enumerate(self._choices))
        metrics.accepted(len(self._choices))
        record.prompt_tokens = sum(map(len, prompts)) * sampling.n
        if timeout_s is not None:
            left_s = record.arrival_time + timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()
        self._choices, self._open, self._sink = [], [], None  # their handles know this: cycles wait for the collector

    def _expire(self) -> None:
        """Free the engine now: whoever sends the error may still be waiting for a slow client."""
        self._expired = True
        for choice in self._choices:
            self._client.abort(choice.handle)
        self._fail(too_late(self._timeout_s or 0.0))

    def abort(self) -> None:
        """End what still runs. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for choice in self._choices:
            if not choice.done:
                self._client.abort(choice.handle)
                self._end(choice, "abort")

    def _end(self, choice: _Choice, reason: str) -> None:
        choice.done = True
        self._metrics.finished(reason, self._record.arrival_time, choice.handle.num_prompt, choice.num_tokens)
        self._record.finish_reasons.append(reason)
        self._record.cached_tokens += choice.handle.cached_len or 0

    # ------------------------------------------------------------------------------------------------------ deltas

    async def first(self) -> list[Delta]:
        """What comes first. Raises `ApiError` if a choice fails before."""
        if self._ended.done():
            self._ended.result()
        self._first = asyncio.get_running_loop().create_future()
        self.tell()
        return await self._first

    async def follow(self, sink: Callable[[list[Delta]], None]) -> None:
        """`sink` gets what came since `first` (or from the beginning), as it comes, until every choice has ended.
        Raises `ApiError` if one fails, and what `sink` raises."""
        self._sink = sink
        self.tell()
        await self._ended

    def hold(self) -> None:
        """Nobody can take deltas now."""
        self._is_held = True

    def resume(self) -> None:
        self._is_held = False
        self.tell()

    def tell(self) -> None:
        if self._is_held or self._ended.done() or (self._sink is None and self._first is None):
            return
        try:
            if found := self._poll(time.monotonic()):
                self._pass_on(found)
            if not self._open:
                self._ended.set_result(None)
        except Exception as error:  # the request's own task raises it: other listeners are told of theirs
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

    def _poll(self, now: float) -> list[Delta]:
        """What came since the last time."""
        found = []
        has_ended = False
        for index, choice in self._open:
            if (delta := self._advance(index, choice, now)) is not None:
                found.append(delta)
                has_ended |= choice.done
        if has_ended:
            self._open = [pair for pair in self._open if not pair[1].done]
        return found

    def _advance(self, index: int, choice: _Choice, now: float) -> Delta | None:
        handle = choice.handle
        reason = handle.reason
        tokens, logprobs = handle.take(), handle.take_logprobs()
        if not tokens and not reason:
            return None
        if reason is FinishReason.ERROR:
            self._end(choice, "error")
            raise self._failure(handle)
        ended_by_token = reason is FinishReason.STOP and bool(tokens)
        began = time.perf_counter_ns()
        text, num_used = self._push(choice, tokens[:-1] if ended_by_token else tokens)
        self._metrics.detokenize.add(time.perf_counter_ns() - began, len(tokens))
        if tokens:
            self._count(choice, tokens[:num_used] if choice.stream.stopped else tokens, now)
        if reason and not choice.stream.stopped:
            text += choice.stream.finish()  # which may complete a stop string
        if choice.stream.stopped:
            self._client.finish(handle)
            reason = FinishReason.STOP
        finish_reason = _REASONS[reason] if reason else None
        if finish_reason is not None:
            self._end(choice, finish_reason)
        if self._record.output is not None:
            self._record.output += text
        scored = tuple(map(_scored, tokens[:num_used], logprobs)) if logprobs else ()
        return Delta(index, text, finish_reason, scored) if text or finish_reason or scored else None

    def _push(self, choice: _Choice, tokens: list[int]) -> tuple[str, int]:
        """New text, and how many of `tokens` it took. With stop strings one by one: what comes after a match counts as
        never generated, however many tokens happened to come together. A match before min_tokens is none."""
        stream = choice.stream
        if not self._sampling.stop:
            return stream.push(tokens), len(tokens)
        parts = []
        for used, token in enumerate(tokens, 1):
            may_stop = choice.num_tokens + used >= self._sampling.min_tokens
            parts.append(stream.push((token,), may_stop=may_stop))
            if stream.stopped:
                return "".join(parts), used
        return "".join(parts), len(tokens)

    def _count(self, choice: _Choice, tokens: list[int], now: float) -> None:
        choice.num_tokens += len(tokens)
        choice.token_ids.extend(tokens)
        self._record.generated_tokens += len(tokens)
        if self._record.ttft_s is None:
            self._record.ttft_s = now - self._record.arrival_time
        self._metrics.tokens(len(tokens), self._record.arrival_time, choice.last_time, now)
        choice.last_time = now

    @staticmethod
    def _failure(handle: RequestHandle) -> ApiError:
        text = handle.error or "the engine gave no reason"
        return engine_gone(text) if handle.engine_gone else engine_error(text)

    # ------------------------------------------------------------------------------------------- prompts and usage

    def prompt_tokens(self, index: int) -> list[ScoredToken]:
        """The prompt of a choice with its log probabilities, once its first token is there. The first has none."""
        prompt = self._prompts[index // self._n].tolist()
        scored = [ScoredToken(token, None, ()) for token in prompt]
        for chunk in self._choices[index].handle.prompt_logprobs.values():
            for i, logprob in enumerate(chunk.logprobs):
                top = tuple(zip(chunk.top_ids[i], chunk.top_logprobs[i], strict=True))
                scored[chunk.first + i] = ScoredToken(prompt[chunk.first + i], logprob, top)
        return scored

    def token_ids(self, index: int) -> list[int]:
        """Generated ids of a choice so far, its stop token included."""
        return self._choices[index].token_ids

    def new_token_ids(self, index: int) -> list[int]:
        """Those that came since this was asked before."""
        choice = self._choices[index]
        found, choice.num_told = choice.token_ids[choice.num_told :], len(choice.token_ids)
        return found

    def usage(self) -> dict[str, object]:
        """OpenAI's usage: each prompt counts once, however many choices it has."""
        num_prompt = sum(len(prompt) for prompt in self._prompts)
        num_generated = sum(choice.num_tokens for choice in self._choices)
        cached = sum(choice.handle.cached_len or 0 for choice in self._choices[:: self._n])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _scored(token: int, found: TokenLogprobs) -> ScoredToken:
    return ScoredToken(token, found.logprob, tuple(zip(found.top_ids, found.top_logprobs, strict=True)))


@dataclass(slots=True)
class Collected:
    """A whole choice."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: str | None = None


async def collect(generation: Generation, num_choices: int) -> list[Collected]:
    """Wait for everything. Raises `ApiError` if a choice fails."""
    parts: list[list[str]] = [[] for _ in range(num_choices)]
    choices = [Collected() for _ in range(num_choices)]

    def sink(deltas: list[Delta]) -> None:
        for delta in deltas:
            parts[delta.index].append(delta.text)
            choices[delta.index].tokens.extend(delta.tokens)
            choices[delta.index].finish_reason = delta.finish_reason

    await generation.follow(sink)
    for choice, texts in zip(choices, parts, strict=True):
        choice.text = "".join(texts)
    return choices


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
