"""One engine, or a pool of them, as a front end sees it: submit requests, take what comes for them. The engine is a
process behind a socket (`ProcessClient`) or a loop in this thread (`InProcessClient`).

Invariants: request ids are never reused; every submitted request ends exactly once, also when the engine dies; a stream
holds no more than its own tokens that nobody has taken; an engine that does not serve has no requests and no pages.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.frontend.adapters import AdapterBook
from minisgl.frontend.engine_socket import EngineSocket
from minisgl.frontend.output_processor import Before, OutputProcessor, RequestState, Subscriber, request_states
from minisgl.frontend.prefixes import PrefixBook
from minisgl.message import (
    AbortRequest,
    AdapterChanged,
    AddRequest,
    CacheCleared,
    EngineFailed,
    EngineReady,
    EngineSays,
    EngineState,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    Hello,
    LoadProgress,
    Narration,
    PrefixChanged,
    Shutdown,
    StepTokens,
    ToEngine,
    Watch,
    Watched,
)
from minisgl.message.codec import Codec, MessageError, decode_said
from minisgl.message.heartbeat import TIMES, Watchdog
from minisgl.metrics.engines import READY, EngineView, EngineViews
from minisgl.metrics.meters import Meter
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl.tokenizer.reference import Formats

SHUTTING_DOWN = "the server is shutting down"
ENGINE = 0  # of the watchdog's processes
LOST_S = 1.0  # from the end of a connection to the end of its requests
MAX_FRAMES = 8  # taken at once
MAX_NOTIFIED = 256  # subscribers in one turn of the event loop


class EngineGone(RuntimeError):
    """The engine process failed or was stopped."""


class EngineClient(ABC):
    """What both have in common: the requests."""

    def __init__(self) -> None:
        self.processor = OutputProcessor()
        self.prefixes = PrefixBook(self._post, self.serving)
        self.adapters = AdapterBook(self._post, self.serving, self.prefixes.tell)
        self._next_id = 0
        self._failure: str | None = None

    @abstractmethod
    def _post(self, message: ToEngine) -> None:
        """For the engine, soon and in order."""

    def serving(self) -> Mapping[int, EngineStats | None]:
        """The numbers of the engines behind this that serve now, with their last figures."""
        return {ENGINE: None}

    def on_kept(self, engine: int, message: PrefixChanged | CacheCleared | AdapterChanged) -> None:
        """What it says of its cache, and of adapters."""
        if isinstance(message, AdapterChanged):
            self.adapters.take(engine, message)
        else:
            self.prefixes.take(engine, message)

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
        *,
        lengths: Sequence[int] | None = None,
        by_prompt: Sequence[SamplingParams] | None = None,
        key: int = 0,
        shown: frozenset[int] = frozenset(),
        formats: Formats | None = None,
        before: Sequence[Before] | None = None,
        background: bool = False,
    ) -> list[RequestState]:
        """`sampling.n` requests of each prompt, see `request_states`. `before`: by choice, what was generated
        elsewhere: the engine goes on from there. `background`: nobody waits for them. Raises `EngineGone`."""
        if self._failure is not None:
            raise EngineGone(self._failure)
        states = request_states(
            prompts,
            sampling,
            tokenizer,
            max_seq_len,
            subscriber,
            lengths=lengths,
            by_prompt=by_prompt,
            key=key,
            shown=shown,
            formats=formats,
        )
        for i, state in enumerate(states):
            if i % sampling.n == 0:
                prompt = state.prompt.tobytes()  # once for all of its choices
            tokens, num_generated = prompt, 0
            if before is not None:
                one = before[i]
                state.cached_len = one.cached_len
                if one.ended:
                    continue
                tokens += np.array(one.tokens, np.int32).tobytes()
                num_generated = len(one.tokens)
            self.processor.add(state, self._next_id, background=background)
            self._next_id += 1
            self._post(AddRequest(state.req_id, tokens, state.sampling, priority, num_generated, key, background))
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
            elif isinstance(message, PrefixChanged | CacheCleared | AdapterChanged):
                self.on_kept(ENGINE, message)

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
    """An engine process that listens at `address`. Use on one event loop, `start` first."""

    def __init__(self, address: str, name: str = "http", num_engines: int | None = None) -> None:
        super().__init__()
        self._views = EngineViews(num_engines)
        self._socket = EngineSocket(address)
        self._pending: list[ToEngine] = [Hello(name)]
        self._loop: asyncio.AbstractEventLoop | None = None  # while it reads
        self._goes_on = False  # in the next turn, with what was taken out of the socket already
        self.ready: asyncio.Future[EngineReady] | None = None
        self._info: EngineReady | None = None
        self.lost = asyncio.Event()  # the engine process has ended the connection
        self.watchdog = Watchdog([ENGINE], lambda _: "the engine process", TIMES.silence_s)
        self.codec = Codec()
        self.dispatch = Meter("dispatch")  # time to receive, and to notify
        self.on_progress: Callable[[str, int, int], None] = lambda text, done, total: None
        self.on_narration: Callable[[Sequence[str]], None] = lambda lines: None
        self.on_watched: Callable[[int, Watched], None] | None = None  # while somebody looks
        self.on_engine_state: Callable[[int, str], None] = lambda engine, state: None

    # ------------------------------------------------------------------------------------------------------- state

    def serving(self) -> Mapping[int, EngineStats | None]:
        return {view.engine: view.last for view in self.engines if view.state == READY}

    @property
    def info(self) -> EngineReady | None:
        """None until the engine is ready."""
        if self._info is None:  # asked many times a request
            ready = self.ready
            is_there = ready is not None and ready.done() and ready.exception() is None
            self._info = ready.result() if ready is not None and is_there else None
        return self._info

    @property
    def engines(self) -> Sequence[EngineView]:
        """What is known of each; of the only one, too."""
        return self._views.all

    @property
    def stats(self) -> EngineStats | None:
        """What all engines say, together."""
        return self._views.together()

    def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ready, self._info = loop.create_future(), None
        self.ready.add_done_callback(lambda future: future.exception())  # a failure may come with nobody waiting
        self._flush()
        self._socket.open(self._on_readable)

    async def close(self) -> None:
        """Shut down and close the connection."""
        self.shut_down()
        self._loop = None
        self._socket.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition`, of what the engines' caches hold, is true. Raises `EngineGone`."""
        changed = asyncio.Event()
        with self.prefixes.listening(changed.set):
            while not condition():
                if self._failure is not None:
                    raise EngineGone(self._failure)
                changed.clear()
                await changed.wait()

    def _stop_reading(self) -> None:
        self._loop = None
        self._socket.stop_reading()

    def shut_down(self) -> None:
        """Tell the engine to shut down. Live requests end with an error."""
        if self._failure is None:
            self._pending.append(Shutdown())
            self._flush()
        self.fail(SHUTTING_DOWN)

    def watch(self, *, steps: bool, tree: bool) -> None:
        """Somebody looks, see `Watch`: `on_watched` gets what engines tell."""
        if self._failure is None and (steps or tree):
            self._post(Watch(steps, tree))

    def fail(self, text: str) -> None:
        """The engine is gone: end everything that waits for it. The first reason stays."""
        if self._failure is not None:
            return
        self._failure = text
        self._views.failed(text)
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(EngineGone(text))
        self.processor.fail(text)
        self.prefixes.tell()

    # ------------------------------------------------------------------------------------------------------- send

    def _post(self, message: ToEngine) -> None:
        """Messages of one turn of the event loop leave in one frame."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        if self._pending:
            self._socket.write(self.codec.encode(self._pending))
            self._pending.clear()

    # ----------------------------------------------------------------------------------------------------- receive

    def _on_readable(self) -> None:
        """Take what is there, then notify those it is for, a slice at a time, others' turns between: tokens of several
        steps leave in one write. Frames are left where they are until all have been notified, so that the engine waits
        for a server that cannot follow."""
        if self._loop is None or self.processor.is_due or self._goes_on:
            return
        self._flush()
        began = time.perf_counter_ns()
        try:
            has_more = self._receive()
        except EOFError:
            self._end()
        except MessageError as error:
            self.fail(f"a message from the engine cannot be read: {error}")
        except (ValueError, TypeError, KeyError, OSError) as error:
            self.fail(f"receiving from the engine failed: {type(error).__name__}: {error}")
        else:
            if self.processor.is_due:
                self._notify(began)
            elif has_more:
                self._go_on_soon()
        if self._failure is not None:
            self._stop_reading()

    def _end(self) -> None:
        """No more can come. Whoever started the process knows best what became of it, and says so soon."""
        loop = self._loop
        self._stop_reading()
        self.lost.set()
        self.processor.notify()
        if loop is not None:
            loop.call_later(LOST_S, self.fail, "the engine process has ended the connection")

    def _notify(self, began: int | None = None) -> None:
        began = began or time.perf_counter_ns()
        self.processor.notify(MAX_NOTIFIED)
        self.dispatch.add(time.perf_counter_ns() - began)
        if self.processor.is_due and self._loop is not None:
            self._loop.call_soon(self._notify)
        else:
            self._go_on_soon()

    def _go_on_soon(self) -> None:
        """The event loop does not tell of what was taken out of the socket already: look once in the next turn."""
        if self._loop is not None and self._socket.holds_bytes:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._on_readable()

    def _receive(self) -> bool:
        """Take up to `MAX_FRAMES`; whether there may be more. Whatever fails here ends the requests that wait for it:
        none may wait forever."""
        for _ in range(MAX_FRAMES):
            if (frame := self._socket.read()) is None:
                return False
            for message in self.codec.decode_from_engine(frame):
                self._take(message)
        return True

    def _take(self, message: FromEngine, engine: int = ENGINE, name: str = "") -> None:
        """`name`: of the engine, for people, where there are several."""
        match message:
            case StepTokens():
                self.processor.process(message)
            case EngineStats():
                self._views.say(engine, message)
            case Heartbeat():
                self.watchdog.hear(ENGINE, message)
            case LoadProgress(text, done, total):
                self.on_progress(name + text, done, total)
            case EngineReady():
                if self.ready is not None and not self.ready.done():
                    self.ready.set_result(message)
                    self.watchdog.expect()
                    self._views.ready()
            case Narration(lines):
                self.on_narration([name + line for line in lines])
            case EngineState(number, state, reason):
                self._views.change(number, state, reason)
                if state != READY:
                    self.adapters.lost(number)
                    self.prefixes.lost(number)
                self.on_engine_state(number, state)
            case EngineSays(number, messages):
                for said in decode_said(messages):
                    self._take(said, number, f"engine {number}: " if len(self.engines) > 1 else "")
            case PrefixChanged() | CacheCleared() | AdapterChanged():
                self.on_kept(engine, message)
            case Watched() if self.on_watched is not None:
                self.on_watched(engine, message)
            case EngineFailed(text):
                self.fail(text)
                self.lost.set()
