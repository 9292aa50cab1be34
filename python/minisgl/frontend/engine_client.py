"""Client side of one engine or a pool of engines: submits requests and receives their output. The engine is a process
behind a socket (`ProcessClient`) or a loop in this thread (`InProcessClient`).

Invariants: request ids are never reused; every submitted request ends exactly once, even if the engine dies; a stream
holds only tokens that its consumer has not taken; an engine that does not serve has no requests and no pages.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

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
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl.tokenizer.reference import Formats

SHUTTING_DOWN = "the server is shutting down"
ENGINE = 0  # process id for the watchdog
LOST_S = 1.0  # seconds from the end of the connection to the end of its requests
MAX_FRAMES = 8  # frames handled at once
MAX_NOTIFIED = 256  # subscribers notified per turn of the event loop
MAX_PIXEL_BYTES = 1 << 28  # pixels of the images of one call of `submit`: a quarter of the longest frame
MAX_LIVE_PIXEL_BYTES = 1 << 30  # pixels of the images of all unfinished requests


class EngineGone(RuntimeError):
    """Error after the engine process failed or was stopped."""


def num_pixel_bytes(images: Sequence[Sequence[PromptImage]]) -> int:
    """Return the bytes of pixels of these images, by prompt. The same image counts once."""
    return sum({image.digest: len(image.pixels) for of_prompt in images for image in of_prompt}.values())


class EngineClient(ABC):
    """Request handling that both engine clients share."""

    def __init__(self) -> None:
        self.processor = OutputProcessor()
        self.prefixes = PrefixBook(self._post, self.serving)
        self.adapters = AdapterBook(self._post, self.serving, self.prefixes.tell)
        self._next_id = 0
        self._failure: str | None = None

    @abstractmethod
    def _post(self, message: ToEngine) -> None:
        """Send a message to the engine soon, in order."""

    @abstractmethod
    def _flush(self) -> None:
        """Send the posted messages now, so that a frame has the images of one call of `submit` at most."""

    @property
    def num_pixel_bytes(self) -> int:
        """Pixels of the images of unfinished requests, in bytes."""
        return sum(state.num_pixel_bytes for state in self.processor.live.values())

    def serving(self) -> Mapping[int, EngineStats | None]:
        """Return the last statistics of each engine that serves now, by engine id."""
        return {ENGINE: None}

    def on_kept(self, engine: int, message: PrefixChanged | CacheCleared | AdapterChanged) -> None:
        """Pass an engine's report about prefixes, the cache or adapters on to its book."""
        if isinstance(message, AdapterChanged):
            self.adapters.take(engine, message)
        else:
            self.prefixes.take(engine, message)

    @property
    def failure(self) -> str | None:
        """Reason why the engine is gone; `None` while it runs."""
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
        images: Sequence[tuple[PromptImage, ...]] = (),
    ) -> list[RequestState]:
        """Submit `sampling.n` requests for each prompt and return their states, see `request_states`. `before`: the
        tokens that another engine has generated, by request. `background`: low priority. `images`: those of each
        prompt; empty: of none. Raises `EngineGone`."""
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
                prior = before[i]
                state.cached_len = prior.cached_len
                if prior.ended:
                    continue
                tokens += np.array(prior.tokens, np.int32).tobytes()
                num_generated = len(prior.tokens)
            self.processor.add(state, self._next_id, background=background)
            self._next_id += 1
            of_prompt = images[i // sampling.n] if images else ()
            state.image_digests = tuple(image.digest for image in of_prompt)
            state.num_pixel_bytes = num_pixel_bytes([of_prompt]) // sampling.n
            self._post(
                AddRequest(state.req_id, tokens, state.sampling, priority, num_generated, key, background, of_prompt)
            )
        if images:
            self._flush()
        return states

    def abort(self, state: RequestState) -> None:
        """Abort a request whose client no longer waits. Does nothing if it has ended."""
        if self.processor.remove(state):
            self._post(AbortRequest(state.req_id))

    def finish(self, state: RequestState) -> None:
        """End a request at a stop string in its text. Does nothing if it has ended."""
        if self.processor.remove(state):
            self._post(FinishRequest(state.req_id))


class InProcessClient(EngineClient):
    """Client of a step loop in this thread, one step per call."""

    def __init__(self) -> None:
        super().__init__()
        self._outbox: list[ToEngine] = []

    def _post(self, message: ToEngine) -> None:
        self._outbox.append(message)

    def _flush(self) -> None:
        """Do nothing: `step` takes the messages."""

    def receive(self, messages: Sequence[FromEngine]) -> None:
        """Handle the messages that the loop sends."""
        for message in messages:
            if isinstance(message, StepTokens):
                self.processor.process(message)
            elif isinstance(message, PrefixChanged | CacheCleared | AdapterChanged):
                self.on_kept(ENGINE, message)

    def step(self, step: Callable[[Sequence[ToEngine]], None]) -> None:
        """Run one step of the loop (`StepLoop.step`) and notify the subscribers with new output."""
        messages, self._outbox = self._outbox, []
        step(messages)
        self.processor.notify()

    def abort_all(self, step: Callable[[Sequence[ToEngine]], None]) -> None:
        """Abort all requests, even those that the loop has not received, and run one step."""
        self._outbox.clear()
        step([AbortRequest(state.req_id) for state in self.processor.remove_all()])


class ProcessClient(EngineClient):
    """Client of the engine process that listens at `address`. Use it on one event loop; call `start` first."""

    def __init__(self, address: str, name: str = "http", num_engines: int | None = None) -> None:
        super().__init__()
        self._views = EngineViews(num_engines)
        self._socket = EngineSocket(address)
        self._pending: list[ToEngine] = [Hello(name)]
        self._loop: asyncio.AbstractEventLoop | None = None  # None: not reading
        self._goes_on = False  # another read is scheduled for the next turn
        self.ready: asyncio.Future[EngineReady] | None = None
        self._info: EngineReady | None = None
        self.blind = ""  # why images cannot be prepared, although the engine accepts them
        self.lost = asyncio.Event()  # the engine process has ended the connection
        self.watchdog = Watchdog([ENGINE], lambda _: "the engine process", TIMES.silence_s)
        self.codec = Codec()
        self.dispatch = Meter("dispatch")  # time to receive, and to notify
        self.on_progress: Callable[[str, int, int], None] = lambda text, done, total: None
        self.on_narration: Callable[[Sequence[str]], None] = lambda lines: None
        self.on_watched: Callable[[int, Watched], None] | None = None  # None: no one watches
        self.on_engine_state: Callable[[int, str], None] = lambda engine, state: None

    # ------------------------------------------------------------------------------------------------------- state

    @property
    def num_pixel_bytes(self) -> int:
        return max(super().num_pixel_bytes, self._socket.num_unsent)  # those of aborted requests may be unsent

    def serving(self) -> Mapping[int, EngineStats | None]:
        return {view.engine: view.last for view in self.engines if view.state == READY}

    @property
    def info(self) -> EngineReady | None:
        """The engine's description; `None` until it is ready."""
        if self._info is None:  # read often per request
            ready = self.ready
            is_there = ready is not None and ready.done() and ready.exception() is None
            self._info = ready.result() if ready is not None and is_there else None
        return self._info

    def be_blind(self, reason: str) -> None:
        """Report from now on that the model reads text only, because of `reason`. The engine must be ready."""
        assert self.info is not None
        self._info, self.blind = replace(self.info, sees=False), reason

    @property
    def engines(self) -> Sequence[EngineView]:
        """Views of all engines, at least one."""
        return self._views.all

    @property
    def stats(self) -> EngineStats | None:
        """Statistics summed over all engines; `None` before the first."""
        return self._views.together()

    def start(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.ready, self._info = loop.create_future(), None
        self.ready.add_done_callback(lambda future: future.exception())  # no warning if nothing awaits it
        self._flush()
        self._socket.open(self._on_readable)

    async def close(self) -> None:
        """Shut the engine down and close the connection."""
        self.shut_down()
        self._loop = None
        self._socket.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which depends on the engines' prefixes or adapters, is true. Raises `EngineGone`."""
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
        """Send the engine a shutdown message. Live requests end with an error."""
        if self._failure is None:
            self._pending.append(Shutdown())
            self._flush()
        self.fail(SHUTTING_DOWN)

    def watch(self, *, steps: bool, tree: bool) -> None:
        """Ask the engines for step or cache views, which go to `on_watched`: see `Watch`."""
        if self._failure is None and (steps or tree):
            self._post(Watch(steps, tree))

    def fail(self, text: str) -> None:
        """End all requests and waits with the error `text`, because the engine is gone. Only the first call counts."""
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
        """Queue a message; those of one turn of the event loop are sent as one frame."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        if self._pending:
            self._socket.write(self.codec.encode_parts(self._pending))
            self._pending.clear()

    # ----------------------------------------------------------------------------------------------------- receive

    def _on_readable(self) -> None:
        """Read available frames, then notify their subscribers in slices between other callbacks, so that tokens of
        several steps leave in one write. Further frames stay in the socket until all are notified, so that the engine
        waits for a server that cannot follow."""
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
        """Handle the end of the connection. `fail` is delayed: the parent process may report a better reason first."""
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
        """Read again in the next turn if the socket's data is already in `frames`, which the event loop cannot see."""
        if self._loop is not None and self._socket.holds_bytes:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._on_readable()

    def _receive(self) -> bool:
        """Handle up to `MAX_FRAMES` frames. Returns whether there may be more. An error here ends the waiting requests,
        so that none waits forever."""
        for _ in range(MAX_FRAMES):
            if (frame := self._socket.read()) is None:
                return False
            for message in self.codec.decode_from_engine(frame):
                self._take(message)
        return True

    def _take(self, message: FromEngine, engine: int = ENGINE, name: str = "") -> None:
        """Handle one message. `name` is the engine's prefix in log lines if there are several."""
        match message:
            case StepTokens():
                self.processor.process(message)
            case EngineStats():
                self._views.say(engine, message)
            case Heartbeat():
                self.watchdog.on_heartbeat(ENGINE, message)
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
                for inner in decode_said(messages):
                    self._take(inner, number, f"engine {number}: " if len(self.engines) > 1 else "")
            case PrefixChanged() | CacheCleared() | AdapterChanged():
                self.on_kept(engine, message)
            case Watched() if self.on_watched is not None:
                self.on_watched(engine, message)
            case EngineFailed(text):
                self.fail(text)
                self.lost.set()
