"""Turns the tokens of steps into the text of requests: stop strings, log probabilities, finish reasons, usage.

Invariants: a request's text does not depend on how its tokens are grouped; a subscriber is notified once for all new
output of its requests; tokens that are not taken cost only memory.
"""

from __future__ import annotations

import collections
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from minisgl.message import PromptLogprobs, StepTokens, TokenLogprobs
from minisgl.metrics.histogram import Histogram
from minisgl.sampling_params import SamplingParams, choice_seed
from minisgl.step import FinishReason, Int32Array
from minisgl.tokenizer import Tokenizer, bad_token_ids

if TYPE_CHECKING:
    from minisgl.tokenizer.reference import Formats


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token, its log probability (`None` for a prompt's first token) and the most likely tokens at its position."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Delta:
    """New text of one request. `finish_reason` ("stop", "length", "abort" or "error") is set in the last one."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: tuple[Logprob, ...] = ()  # log probabilities of the text, if requested


@dataclass(slots=True)
class Before:
    """Tokens of a choice that another server has generated: all of them if `ended`. `cached_len` are the prompt tokens
    that were cached there."""

    tokens: list[int]
    cached_len: int | None
    ended: bool = False


class Subscriber:
    """Callback for the output of one or more requests. `notify()` is called when output has arrived; it collects the
    output itself and must not raise."""

    __slots__ = ("is_due", "notify")

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify = notify
        self.is_due = False


class RequestState:
    """State of one request in an engine: its new output and its text so far. `sampling` is resolved (`request_states`);
    `key` is the index of its API key; `shown` are special tokens that appear in its text; `formats` say how the text is
    parsed (`None`: not at all)."""

    __slots__ = (
        "_num_reported",
        "_stream",
        "background",
        "cached_len",
        "embedding",
        "engine_gone",
        "error",
        "finish_reason",
        "found_stop",
        "image_digests",
        "index",
        "key",
        "last_time",
        "logprobs",
        "num_pixel_bytes",
        "prompt",
        "prompt_logprobs",
        "reason",
        "req_id",
        "sampling",
        "sent_at",
        "subscriber",
        "token_ids",
        "tokens",
        "waits",
    )

    def __init__(
        self,
        index: int,
        prompt: Int32Array,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        subscriber: Subscriber,
        key: int = 0,
        shown: frozenset[int] = frozenset(),
        formats: Formats | None = None,
    ) -> None:
        self.index = index  # among the requests of one call
        self.key = key
        self.prompt = prompt
        self.sampling = sampling
        self.subscriber = subscriber
        self.req_id = -1  # set by `EngineClient.submit`, like the next five
        self.image_digests: tuple[bytes, ...] = ()
        self.num_pixel_bytes = 0  # this choice's part of the pixels of the prompt's images
        self.sent_at = 0.0
        self.waits = False  # waits for its first step
        self.background = False
        self.cached_len: int | None = None
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # by first position
        self.embedding: bytes | None = None  # float32 bytes, of no fixed length
        self.error: str | None = None
        self.engine_gone = False
        # received and not taken yet
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.reason = FinishReason.NONE
        # already taken
        self.token_ids: list[int] = []  # includes a final stop token
        self.finish_reason: str | None = None
        self.found_stop = False  # ended by a stop string
        self.last_time: float | None = None  # for meters of the time between tokens
        self._num_reported = 0  # items of `token_ids` returned by `new_token_ids`
        self._stream = tokenizer.new_stream(sampling.stop, shown, sampling.min_tokens, formats)

    def take(self) -> Delta | None:
        """Return the text of the output since the last call; `None` if there is nothing to show."""
        tokens, reason, logprobs = self.tokens, self.reason, self.logprobs
        if self.finish_reason is not None or not (tokens or reason):
            return None
        self.tokens = []
        if not (reason or logprobs or self.sampling.stop):  # the common case
            self.token_ids += tokens
            text = self._stream.push(tokens)
            return Delta(self.index, text, None) if text else None
        self.logprobs = []
        by_token = reason is FinishReason.STOP
        text, num_used = self._stream.take(tokens, bool(reason), by_token)
        self.token_ids += tokens[:num_used]
        if self._stream.stopped:
            self.found_stop, reason = True, FinishReason.STOP
        if reason:
            self.finish_reason = reason.name.lower()
        shown = tokens[:-1] if by_token else tokens  # a stop token gives no text
        entries = tuple(map(_logprob, shown[:num_used], logprobs)) if logprobs else ()
        return Delta(self.index, text, self.finish_reason, entries) if text or reason or entries else None

    @property
    def matched_stop(self) -> str | None:
        """Stop string that ended the request, or `None`."""
        return self._stream.matched_stop

    def new_token_ids(self) -> list[int]:
        """Return the items of `token_ids` that were added since the last call."""
        new_ids, self._num_reported = self.token_ids[self._num_reported :], len(self.token_ids)
        return new_ids

    def prompt_tokens(self) -> list[Logprob]:
        """Return the prompt's tokens with log probabilities (`None` for the first), once a token is generated."""
        prompt = self.prompt.tolist()
        tokens = [Logprob(token, None, ()) for token in prompt]
        for chunk in self.prompt_logprobs.values():
            for i, logprob in enumerate(chunk.logprobs):
                top = tuple(zip(chunk.top_ids[i], chunk.top_logprobs[i], strict=True))
                tokens[chunk.first + i] = Logprob(prompt[chunk.first + i], logprob, top)
        return tokens


class OutputProcessor:
    """The live requests of one engine. `process` adds a step's output to their states; `notify` then calls their
    subscribers, which take the text."""

    def __init__(self) -> None:
        self.live: dict[int, RequestState] = {}
        self.num_background = 0  # live low-priority requests
        self.num_waiting = 0  # other live requests without a first step yet
        self.num_waiting_tokens = 0  # tokens of their prompts
        self._waiting_of: dict[int, tuple[int, int]] = {}  # (requests, prompt tokens) by API key
        self.queue: Histogram | None = None  # time from sending a request to its first step
        self._due: collections.deque[Subscriber] = collections.deque()  # in the order of arrival

    @property
    def is_due(self) -> bool:
        """Whether a subscriber waits for its notification."""
        return bool(self._due)

    def add(self, state: RequestState, req_id: int, *, background: bool = False) -> None:
        self.live[req_id] = state
        state.req_id, state.sent_at, state.waits, state.background = (
            req_id,
            time.monotonic(),
            not background,
            background,
        )
        if background:  # does not count as waiting
            self.num_background += 1
            return
        self._waits(state, 1)

    def remove(self, state: RequestState) -> bool:
        """Remove a request and drop its further output. Returns False if it has ended."""
        if self.live.pop(state.req_id, None) is None:
            return False
        self.num_background -= state.background
        self._no_longer_waits(state)
        return True

    def waiting_for(self, key: int) -> tuple[int, int]:
        """Return how many requests of an API key wait for their first step, and the tokens of their prompts."""
        return self._waiting_of.get(key, (0, 0))

    def remove_all(self) -> list[RequestState]:
        states, self.live = list(self.live.values()), {}
        self.num_background = self.num_waiting = self.num_waiting_tokens = 0
        self._waiting_of.clear()
        self._due.clear()
        return states

    def fail(self, error: str) -> None:
        """End all requests with `error`, because the engine is gone, and notify every subscriber with output."""
        due = dict.fromkeys(self._due)
        for state in self.remove_all():
            state.error = error
            state.engine_gone = True
            state.reason = FinishReason.ERROR
            due[state.subscriber] = None
        for subscriber in due:
            subscriber.is_due = False
            subscriber.notify()

    def _no_longer_waits(self, state: RequestState) -> None:
        if state.waits:
            state.waits = False
            self._waits(state, -1)

    def _waits(self, state: RequestState, count: int) -> None:
        num_tokens = count * len(state.prompt)
        self.num_waiting += count
        self.num_waiting_tokens += num_tokens
        requests, tokens = self._waiting_of.get(state.key, (0, 0))
        self._waiting_of[state.key] = (requests + count, tokens + num_tokens)

    # ----------------------------------------------------------------------------------------------------- outputs

    def process(self, message: StepTokens) -> None:
        """Add a step's output to its requests' states. Raises `ValueError` if its arrays' lengths differ."""
        live = self.live
        if message.admitted_ids:
            self._admitted(message)
        for chunk in message.prompt_logprobs:
            if (state := live.get(chunk.req_id)) is not None:
                state.prompt_logprobs[chunk.first] = chunk
        for embedding in message.embeddings:
            if (state := live.get(embedding.req_id)) is not None:
                state.embedding = embedding.numbers
        ids = np.frombuffer(message.req_ids, np.int64).tolist()
        tokens = np.frombuffer(message.tokens, np.int32).tolist()
        reasons = np.frombuffer(message.reasons, np.int32).tolist()
        for logprob in message.logprobs:
            if (state := live.get(ids[logprob.index])) is not None:
                state.logprobs.append(logprob)
        due = self._due
        for req_id, token, reason in zip(ids, tokens, reasons, strict=True):  # once per token: no function calls
            state = live.get(req_id)
            if state is None:
                continue  # aborted or finished here; the engine did not know it yet
            if token >= 0:
                state.tokens.append(token)
            if reason:
                self.remove(state)
                state.reason = FinishReason(reason)
                state.error = message.errors.get(req_id)
            subscriber = state.subscriber
            if not subscriber.is_due:
                subscriber.is_due = True
                due.append(subscriber)

    def _admitted(self, message: StepTokens) -> None:
        lens = np.frombuffer(message.cached_lens, np.int32).tolist()
        for req_id, cached_len in zip(np.frombuffer(message.admitted_ids, np.int64).tolist(), lens, strict=True):
            if (state := self.live.get(req_id)) is not None:
                if state.cached_len is None:  # otherwise known from another server
                    state.cached_len = cached_len
                self._no_longer_waits(state)
                if self.queue is not None and not state.background:
                    self.queue.observe(time.monotonic() - state.sent_at)

    def notify(self, most: int | None = None) -> None:
        """Notify up to `most` subscribers with new output; `None`: all of them."""
        due = self._due
        for _ in range(len(due) if most is None else min(len(due), most)):
            subscriber = due.popleft()
            subscriber.is_due = False
            subscriber.notify()


def request_states(
    prompts: Sequence[Int32Array],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    max_seq_len: int,
    subscriber: Subscriber,
    *,
    lengths: Sequence[int] | None = None,
    by_prompt: Sequence[SamplingParams] | None = None,
    key: int = 0,
    shown: frozenset[int] = frozenset(),
    formats: Formats | None = None,
) -> list[RequestState]:
    """Return `sampling.n` states for each prompt; state i * n + j belongs to prompt i. Each has its own seed and a
    token limit, which also limits `min_tokens`. `lengths`, `by_prompt`: each prompt's limit and parameters."""
    drawn = secrets.randbits(63)
    states: list[RequestState] = []
    for i, prompt in enumerate(prompts):
        sampling = sampling if by_prompt is None else by_prompt[i]
        seed = drawn if sampling.seed is None else sampling.seed
        left = max_seq_len - len(prompt)
        max_tokens = left if sampling.max_tokens is None else min(sampling.max_tokens, left)
        if lengths is not None:
            max_tokens = lengths[i]
        min_tokens = min(sampling.min_tokens, max_tokens)
        for j in range(sampling.n):
            resolved = msgspec.structs.replace(
                sampling, n=1, seed=choice_seed(seed, j), max_tokens=max_tokens, min_tokens=min_tokens
            )
            states.append(RequestState(len(states), prompt, resolved, tokenizer, subscriber, key, shown, formats))
    return states


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
    """Return the parameters with `bad_words` as token ids. Raises the errors of `Tokenizer.encode`."""
    if not sampling.bad_words:
        return sampling
    bad_ids = bad_token_ids(tokenizer, sampling.bad_words, vocab_size)
    return msgspec.structs.replace(sampling, bad_token_ids=sampling.bad_token_ids + bad_ids)


def _logprob(token: int, logprob: TokenLogprobs) -> Logprob:
    return Logprob(token, logprob.logprob, tuple(zip(logprob.top_ids, logprob.top_logprobs, strict=True)))
