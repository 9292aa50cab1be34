"""The HTTP process's end of the engine: submit requests, receive their tokens.

Keeps true: request ids are never reused; every submitted request gets exactly one terminal chunk, also when the engine
dies; a stream holds no more than its own undelivered tokens; a listener is told once of all that is there.
Doesn't know: HTTP, text, how the engine process is started.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import zmq

from minisgl.message import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    LoadProgress,
    MessageError,
    Narration,
    PromptLogprobs,
    Shutdown,
    StepTokens,
    ToEngine,
    TokenLogprobs,
)
from minisgl.metrics.histogram import Histogram
from minisgl.metrics.meters import Meter
from minisgl.metrics.transport import Transport
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array

LINGER_MS = 500
MAX_QUEUED_FRAMES = 4  # that nobody has read; beyond, the engine waits for this process
MAX_FRAMES = 8  # taken at once
MAX_TOLD = 256  # listeners in one turn of the event loop


class EngineGone(RuntimeError):
    """The engine process failed or was stopped."""


class Listener(Protocol):
    """Who waits for requests. `is_told` is the client's: whether `tell` is due for what came."""

    is_told: bool

    def tell(self) -> None:
        """Something came for one or more of its requests. Must not raise."""


class RequestHandle:
    """One request in the engine. `tokens` and `logprobs` hold what has come, until they are taken."""

    __slots__ = (
        "cached_len",
        "engine_gone",
        "error",
        "listener",
        "logprobs",
        "num_prompt",
        "prompt_logprobs",
        "reason",
        "req_id",
        "sent_at",
        "tokens",
        "waits",
    )

    def __init__(self, req_id: int, listener: Listener, num_prompt: int) -> None:
        self.req_id = req_id
        self.num_prompt = num_prompt
        self.sent_at = time.monotonic()
        self.waits = True  # for its first step
        self.listener = listener
        self.tokens: list[int] = []
        self.reason = FinishReason.NONE
        self.error: str | None = None
        self.engine_gone = False
        self.cached_len: int | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # by first position

    def take(self) -> list[int]:
        """Tokens since the last call, the stop token that ended the request included."""
        tokens, self.tokens = self.tokens, []
        return tokens

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those of the tokens since the last call, if the request asked for them."""
        if not (logprobs := self.logprobs):
            return logprobs
        self.logprobs = []
        return logprobs


class EngineClient:
    """Binds both sockets; the engine process connects. Use on one event loop, `start` first."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)  # with no limit it is never full
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.setsockopt(zmq.LINGER, LINGER_MS)
        self._outbox.bind(to_engine)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
        self._inbox.setsockopt(zmq.LINGER, 0)  # else a full inbox of a dead engine never closes
        self._inbox.bind(from_engine)
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._live: dict[int, RequestHandle] = {}
        self._next_id = 0
        self._pending: list[ToEngine] = []
        self._told: collections.deque[Listener] = collections.deque()  # for whom something came, in that order
        self._loop: asyncio.AbstractEventLoop | None = None  # while it reads
        self._failure: str | None = None
        self.ready: asyncio.Future[EngineReady] | None = None
        self.stats: EngineStats | None = None
        self.beat = Heartbeat("working", 0.0)
        self.beat_time = 0.0  # time.monotonic of its arrival
        self._num_waiting = 0  # sent, and not known to have a row
        self._num_waiting_tokens = 0
        self.transport = Transport()  # encodes and decodes
        self.dispatch: Meter | None = None  # time to hand out what came
        self.queue: Histogram | None = None  # time from sending a request to its first step
        self.on_progress: Callable[[str, int, int], None] = lambda text, done, total: None
        self.on_narration: Callable[[Sequence[str]], None] = lambda lines: None

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def info(self) -> EngineReady | None:
        """None until the engine is ready."""
        ready = self.ready
        return ready.result() if ready is not None and ready.done() and ready.exception() is None else None

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that were sent and have no row yet."""
        return self._num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Of their prompts."""
        return self._num_waiting_tokens

    def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        self.ready.add_done_callback(lambda future: future.exception())  # a failure may come with nobody waiting
        loop.add_reader(self._inbox_fd, self._on_readable)
        loop.call_soon(self._on_readable)  # the descriptor tells of changes only

    async def close(self) -> None:
        """Shut down and close the sockets."""
        self.shut_down()
        self._stop_reading()
        self._outbox.close()
        self._inbox.close()
        self._context.term()

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._inbox_fd)
            self._loop = None

    def shut_down(self) -> None:
        """Tell the engine to shut down. Live requests end with an error."""
        if self._failure is None:
            self._pending.append(Shutdown())
            self._flush()
        self.fail("the server is shutting down")

    def fail(self, text: str) -> None:
        """The engine is gone: end everything that waits for it. The first reason stays."""
        if self._failure is not None:
            return
        self._failure = text
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(EngineGone(text))
        live, self._live = self._live, {}
        self._num_waiting = self._num_waiting_tokens = 0
        for handle in live.values():
            handle.error = text
            handle.engine_gone = True
            handle.reason = FinishReason.ERROR
            handle.listener.tell()

    # ---------------------------------------------------------------------------------------------------- requests

    def submit(
        self, prompt: Int32Array, sampling: SamplingParams, listener: Listener, priority: int = 0
    ) -> RequestHandle:
        """Send a request whose `sampling` is resolved (seed, max_tokens, n = 1). Raises `EngineGone`."""
        if self._failure is not None:
            raise EngineGone(self._failure)
        handle = RequestHandle(self._next_id, listener, len(prompt))
        self._next_id += 1
        self._live[handle.req_id] = handle
        self._num_waiting += 1
        self._num_waiting_tokens += len(prompt)
        self._post(AddRequest(handle.req_id, prompt.tobytes(), sampling, priority))
        return handle

    def abort(self, handle: RequestHandle) -> None:
        """Nobody waits for it any more. No-op if it has ended."""
        if self._drop(handle.req_id):
            self._post(AbortRequest(handle.req_id))

    def finish(self, handle: RequestHandle) -> None:
        """A stop string was found: what the engine still sends for it is dropped. No-op if it has ended."""
        if self._drop(handle.req_id):
            self._post(FinishRequest(handle.req_id))

    def _drop(self, req_id: int) -> bool:
        handle = self._live.pop(req_id, None)
        if handle is not None:
            self._no_longer_waits(handle)
        return handle is not None

    def _no_longer_waits(self, handle: RequestHandle) -> None:
        if handle.waits:
            handle.waits = False
            self._num_waiting -= 1
            self._num_waiting_tokens -= handle.num_prompt

    def _post(self, message: ToEngine) -> None:
        """Messages of one turn of the event loop leave in one frame."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        if self._pending and not self._outbox.closed:
            with contextlib.suppress(zmq.Again):  # nobody is connected: not yet, or the engine process is dead
                self._outbox.send(self.transport.encode(self._pending), zmq.NOBLOCK)
            self._pending.clear()

    # ----------------------------------------------------------------------------------------------------- receive

    def _on_readable(self) -> None:
        """Take what is there, then tell those it is for, a slice at a time, others' turns between: tokens of several
        steps leave in one write. Frames are left where they are until all have been told, so that the engine waits for
        a server that cannot follow."""
        if self._loop is None or self._told:
            return
        self._flush()
        began = time.perf_counter_ns()
        try:
            has_more = self._receive()
        except MessageError as error:
            self.fail(f"a message from the engine cannot be read: {error}")
        except (ValueError, TypeError, KeyError, zmq.ZMQError) as error:
            self.fail(f"receiving from the engine failed: {type(error).__name__}: {error}")
        else:
            if self._told:
                self._tell_some(began)
            elif has_more:
                self._loop.call_soon(self._on_readable)
        if self._failure is not None:
            self._stop_reading()

    def _tell_some(self, began: int | None = None) -> None:
        told = self._told
        began = began or time.perf_counter_ns()
        for _ in range(min(len(told), MAX_TOLD)):
            listener = told.popleft()
            listener.is_told = False
            listener.tell()
        if self.dispatch is not None:
            self.dispatch.add(time.perf_counter_ns() - began)
        if self._loop is not None:  # the socket's descriptor tells only once of what is left
            self._loop.call_soon(self._tell_some if told else self._on_readable)

    def _receive(self) -> bool:
        """Take up to `MAX_FRAMES`; whether there may be more. Whatever fails here ends the requests that wait for it:
        none may hang."""
        for _ in range(MAX_FRAMES):
            if not int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False  # cheaper to ask than to be refused
            for message in self.transport.decode_from_engine(self._inbox.recv(zmq.NOBLOCK)):
                self._take(message)
        return True

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepTokens():
                self._dispatch(message)
            case EngineStats():
                self.stats = message
            case Heartbeat():
                self.beat, self.beat_time = message, time.monotonic()
            case LoadProgress(text, done, total):
                self.on_progress(text, done, total)
            case EngineReady():
                if self.ready is not None and not self.ready.done():
                    self.ready.set_result(message)
                    self.beat_time = time.monotonic()  # from now on it must beat
            case Narration(lines):
                self.on_narration(lines)
            case EngineFailed(text):
                self.fail(text)

    def _dispatch(self, message: StepTokens) -> None:
        live = self._live
        if message.bound_ids:
            lens = np.frombuffer(message.cached_lens, np.int32).tolist()
            for req_id, cached_len in zip(np.frombuffer(message.bound_ids, np.int64).tolist(), lens, strict=True):
                if (handle := live.get(req_id)) is not None:
                    handle.cached_len = cached_len
                    self._no_longer_waits(handle)
                    if self.queue is not None:
                        self.queue.observe(time.monotonic() - handle.sent_at)
        for chunk in message.prompt_logprobs:
            if (handle := live.get(chunk.req_id)) is not None:
                handle.prompt_logprobs[chunk.first] = chunk
        ids = np.frombuffer(message.req_ids, np.int64).tolist()
        tokens = np.frombuffer(message.tokens, np.int32).tolist()
        reasons = np.frombuffer(message.reasons, np.int32).tolist()
        for found in message.logprobs:
            if (handle := live.get(ids[found.index])) is not None:
                handle.logprobs.append(found)
        told = self._told
        for req_id, token, reason in zip(ids, tokens, reasons, strict=True):  # once a token: no calls on the way
            handle = live.get(req_id)
            if handle is None:
                continue  # aborted or finished here, the engine did not know yet
            if token >= 0:
                handle.tokens.append(token)
            if reason:
                self._drop(req_id)
                handle.reason = FinishReason(reason)
                handle.error = message.errors.get(req_id)
            listener = handle.listener
            if not listener.is_told:
                listener.is_told = True
                told.append(listener)


def resolve(sampling: SamplingParams, seed: int, max_tokens: int) -> SamplingParams:
    """What the engine gets: one choice, its seed and its limit, which min_tokens cannot exceed either."""
    min_tokens = min(sampling.min_tokens, max_tokens)
    return msgspec.structs.replace(sampling, n=1, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens)
