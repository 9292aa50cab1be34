"""One engine, as a front end sees it: submit requests, take what comes for them. The engine is a process behind sockets
(`ProcessClient`) or a loop in this thread (`InProcessClient`).

Keeps true: request ids are never reused; every submitted request ends exactly once, also when the engine dies; a stream
holds no more than its own tokens that nobody has taken.
Doesn't know: HTTP, how an engine is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import zmq

from minisgl.frontend.output_processor import OutputProcessor, RequestState, Subscriber, request_states
from minisgl.heartbeat import Watchdog
from minisgl.message import (
    AbortRequest,
    AddRequest,
    Codec,
    EngineFailed,
    EngineReady,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    LoadProgress,
    MessageError,
    Narration,
    Shutdown,
    StepTokens,
    ToEngine,
)
from minisgl.metrics.meters import Meter
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

LINGER_MS = 500
ENGINE = 0  # of the watchdog's processes
SILENCE_S = 3.0  # between two heartbeats, which come every 0.5 s
MAX_QUEUED_FRAMES = 4  # that nobody has read; beyond, the engine waits for this process
MAX_FRAMES = 8  # taken at once
MAX_NOTIFIED = 256  # subscribers in one turn of the event loop


class EngineGone(RuntimeError):
    """The engine process failed or was stopped."""


class EngineClient(ABC):
    """What both have in common: the requests."""

    def __init__(self) -> None:
        self.processor = OutputProcessor()
        self._next_id = 0
        self._failure: str | None = None

    @abstractmethod
    def _post(self, message: ToEngine) -> None:
        """For the engine, soon and in order."""

    @property
    def failure(self) -> str | None:
        """Why the engine is gone; None while it is not."""
        return self._failure

    @property
    def num_live(self) -> int:
        return len(self.processor.live)

    def submit(
        self,
        prompts: Sequence[Int32Array],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        max_seq_len: int,
        subscriber: Subscriber,
        priority: int = 0,
    ) -> list[RequestState]:
        """`sampling.n` requests of each prompt, see `request_states`. Raises `EngineGone`."""
        if self._failure is not None:
            raise EngineGone(self._failure)
        states = request_states(prompts, sampling, tokenizer, max_seq_len, subscriber)
        for state in states:
            self.processor.add(state, self._next_id)
            self._next_id += 1
            self._post(AddRequest(state.req_id, state.prompt.tobytes(), state.sampling, priority))
        return states

    def abort(self, state: RequestState) -> None:
        """Nobody waits for it any more. No-op if it has ended."""
        if self.processor.remove(state):
            self._post(AbortRequest(state.req_id))

    def finish(self, state: RequestState) -> None:
        """A stop string was found in its text. No-op if it has ended."""
        if self.processor.remove(state):
            self._post(FinishRequest(state.req_id))


class InProcessClient(EngineClient):
    """The engine's loop runs here, a step a call."""

    def __init__(self) -> None:
        super().__init__()
        self._outbox: list[ToEngine] = []

    def _post(self, message: ToEngine) -> None:
        self._outbox.append(message)

    def receive(self, messages: Sequence[FromEngine]) -> None:
        """What the loop sends."""
        for message in messages:
            if isinstance(message, StepTokens):
                self.processor.process(message)

    def step(self, step: Callable[[Sequence[ToEngine]], None]) -> None:
        """Let the loop take one step (`StepLoop.step`) and notify whom it concerns."""
        messages, self._outbox = self._outbox, []
        step(messages)
        self.processor.notify()

    def abort_all(self, step: Callable[[Sequence[ToEngine]], None]) -> None:
        """Also what the loop has not heard of yet."""
        self._outbox.clear()
        step([AbortRequest(state.req_id) for state in self.processor.remove_all()])


class ProcessClient(EngineClient):
    """An engine process. Binds both sockets; the engine process connects. Use on one event loop, `start` first."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        super().__init__()
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
        self._pending: list[ToEngine] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # while it reads
        self.ready: asyncio.Future[EngineReady] | None = None
        self.stats: EngineStats | None = None
        self.watchdog = Watchdog([ENGINE], lambda _: "the engine process", SILENCE_S)
        self.codec = Codec()
        self.dispatch = Meter("dispatch")  # time to receive, and to notify
        self.on_progress: Callable[[str, int, int], None] = lambda text, done, total: None
        self.on_narration: Callable[[Sequence[str]], None] = lambda lines: None

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def info(self) -> EngineReady | None:
        """None until the engine is ready."""
        ready = self.ready
        return ready.result() if ready is not None and ready.done() and ready.exception() is None else None

    def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        self.ready.add_done_callback(lambda future: future.exception())  # a failure may come with nobody waiting
        loop.add_reader(self._inbox_fd, self._on_readable)
        loop.call_soon(self._on_readable)  # the descriptor reports changes only

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
        self.processor.fail(text)

    # ------------------------------------------------------------------------------------------------------- send

    def _post(self, message: ToEngine) -> None:
        """Messages of one turn of the event loop leave in one frame."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        if self._pending and not self._outbox.closed:
            with contextlib.suppress(zmq.Again):  # nobody is connected: not yet, or the engine process is dead
                self._outbox.send(self.codec.encode(self._pending), zmq.NOBLOCK)
            self._pending.clear()

    # ----------------------------------------------------------------------------------------------------- receive

    def _on_readable(self) -> None:
        """Take what is there, then notify those it is for, a slice at a time, others' turns between: tokens of several
        steps leave in one write. Frames are left where they are until all have been notified, so that the engine waits
        for a server that cannot follow."""
        if self._loop is None or self.processor.is_due:
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
            if self.processor.is_due:
                self._notify(began)
            elif has_more:
                self._loop.call_soon(self._on_readable)
        if self._failure is not None:
            self._stop_reading()

    def _notify(self, began: int | None = None) -> None:
        began = began or time.perf_counter_ns()
        self.processor.notify(MAX_NOTIFIED)
        self.dispatch.add(time.perf_counter_ns() - began)
        if self._loop is not None:  # the socket's descriptor reports what is left only once
            self._loop.call_soon(self._notify if self.processor.is_due else self._on_readable)

    def _receive(self) -> bool:
        """Take up to `MAX_FRAMES`; whether there may be more. Whatever fails here ends the requests that wait for it:
        none may wait forever."""
        for _ in range(MAX_FRAMES):
            if not int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False  # cheaper to ask than to be refused
            for message in self.codec.decode_from_engine(self._inbox.recv(zmq.NOBLOCK)):
                self._take(message)
        return True

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepTokens():
                self.processor.process(message)
            case EngineStats():
                self.stats = message
            case Heartbeat():
                self.watchdog.hear(ENGINE, message)
            case LoadProgress(text, done, total):
                self.on_progress(text, done, total)
            case EngineReady():
                if self.ready is not None and not self.ready.done():
                    self.ready.set_result(message)
                    self.watchdog.expect()
            case Narration(lines):
                self.on_narration(lines)
            case EngineFailed(text):
                self.fail(text)
