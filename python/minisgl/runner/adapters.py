"""LoRA adapters in the engine process: read from disk while steps run, added to the engine between two steps, and
removed once no request uses them.

Invariants: a request that names an adapter reaches the scheduler once the adapter is in the engine, or is refused; an
admitted request keeps its adapter to its end; no step waits for a file.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from minisgl.engine.adapters import Adapts
from minisgl.engine.api import Engine
from minisgl.message import (
    AbortRequest,
    AdapterChanged,
    AddRequest,
    FinishRequest,
    FromEngine,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)
from minisgl.step import FinishReason

_log = logging.getLogger("minisgl.engine")
LOADED, REFUSED, UNLOADED = "loaded", "refused", "unloaded"
End = Callable[[int, FinishReason, str], None]
"""Callback (request id, reason, error text) that reports a request's end."""


class EngineAdapters:
    """Loads and unloads adapters, and holds the requests that wait for one. `end` ends a request that never reaches the
    scheduler; `in_use` returns adapter ids in use. `wake` is called in the reader's thread; `None`: reading blocks."""

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Sequence[FromEngine]], None],
        end: End,
        in_use: Callable[[], set[int]],
        wake: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._send = send
        self._end = end
        self._in_use = in_use
        self._wake = wake
        self._reader: ThreadPoolExecutor | None = None
        self._done: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._loaded: set[int] = set()
        self._held: dict[int, list[AddRequest]] = {}  # waiting requests by adapter that is being read
        self._leaving: set[int] = set()

    @property
    def has_removals(self) -> bool:
        """Whether an adapter is waiting to be removed, so that a step must check if it is still in use."""
        return bool(self._leaving)

    def intake(self, messages: Sequence[ToEngine]) -> Sequence[ToEngine]:
        """Handle adapter messages. Returns the others, and the requests that need not wait for an adapter, in order."""
        if not self._loaded and not self._held and not any(_is_own(message) for message in messages):
            return messages
        others: list[ToEngine] = self._take_done()
        for message in messages:
            match message:
                case LoadAdapter():
                    self._load(message)
                case UnloadAdapter(number):
                    self._unload(number)
                case AddRequest() if message.sampling.adapter in self._held:
                    self._held[message.sampling.adapter].append(message)
                case AddRequest() if (number := message.sampling.adapter) and number not in self._loaded:
                    self._end(message.req_id, FinishReason.ERROR, f"adapter {number} is not loaded")
                case AbortRequest(req_id) if self._drop(req_id):
                    self._end(req_id, FinishReason.ABORT, "")
                case FinishRequest(req_id) if self._drop(req_id):
                    self._end(req_id, FinishReason.STOP, "")
                case _:
                    others.append(message)
        others += self._take_done() if self._wake is None else []
        if self._leaving:
            self._remove_unused(others)
        return others

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown()

    # --------------------------------------------------------------------------------------------------------- orders

    def _load(self, order: LoadAdapter) -> None:
        number, engine = order.adapter, self._engine
        if number in self._loaded:
            self._say(number, LOADED)
        elif not isinstance(engine, Adapts):
            self._say(number, REFUSED, f"--engine {engine.info.name} does not support adapters")
        elif number not in self._held:
            self._held[number] = []
            self._reader = self._reader or ThreadPoolExecutor(1, "adapters")
            reading = self._reader.submit(engine.read_adapter, order.path)
            if self._wake is None:
                wait((reading,))
                self._done.put((number, reading))
            else:
                reading.add_done_callback(partial(self._was_read, number))

    def _was_read(self, number: int, reading: Future[Any]) -> None:
        """Pass on the result of a read, or its error. Runs in the reader's thread."""
        self._done.put((number, reading))
        if self._wake is not None:
            self._wake()

    def _take_done(self) -> list[ToEngine]:
        """Add the adapters that were read to the engine and return the requests that waited for them."""
        released: list[ToEngine] = []
        while not self._done.empty():
            number, reading = self._done.get()
            waiting = self._held.pop(number)
            if error := _refusal(reading.exception()):
                self._leaving.discard(number)
                self._say(number, REFUSED, error)
                for request in waiting:
                    self._end(request.req_id, FinishReason.ERROR, f"adapter: {error}")
                continue
            assert isinstance(self._engine, Adapts)
            self._engine.add_adapter(number, reading.result())
            self._loaded.add(number)
            released += waiting
            if number not in self._leaving:
                self._say(number, LOADED)
        return released

    def _unload(self, number: int) -> None:
        if number in self._loaded or number in self._held:
            self._leaving.add(number)
        self._say(number, UNLOADED)

    def _remove_unused(self, coming: Sequence[ToEngine]) -> None:
        assert isinstance(self._engine, Adapts)
        named = self._in_use() | {message.sampling.adapter for message in coming if isinstance(message, AddRequest)}
        for number in self._leaving & self._loaded - named:
            self._engine.remove_adapter(number)
            self._loaded.discard(number)
            self._leaving.discard(number)

    def _drop(self, req_id: int) -> bool:
        """Remove the request if it waits for an adapter. Returns whether it did."""
        for waiting in self._held.values():
            for index, request in enumerate(waiting):
                if request.req_id == req_id:
                    del waiting[index]
                    return True
        return False

    def _say(self, number: int, state: str, reason: str = "") -> None:
        self._send([AdapterChanged(number, state, reason)])


def _refusal(error: BaseException | None) -> str:
    """Return why an adapter was not read, or an empty string if it was. Logs unexpected errors."""
    if error is None:
        return ""
    if isinstance(error, ValueError | OSError | RuntimeError | MemoryError):
        return str(error) or type(error).__name__
    _log.error("unexpected error while reading an adapter", exc_info=error)
    return f"internal error: {type(error).__name__}"


def _is_own(message: ToEngine) -> bool:
    return isinstance(message, LoadAdapter | UnloadAdapter) or (
        isinstance(message, AddRequest) and message.sampling.adapter > 0
    )
