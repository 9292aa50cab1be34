"""One request's way to its client, below ASGI: chunks of a stream go straight into the transport's buffer. Clients that
do not read what was written for them are dropped after a time.

Invariants: a client that goes away cancels the task that answers it, at the transport's event; a client that does not
read is known at once, so that nobody formats what cannot be sent: what a stream has not sent is bounded (its next
chunk, and the tokens of its requests, which end).
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CONNECTION = "minisgl.connection"
"""Key of the ASGI scope; http.py puts it there."""
_log = logging.getLogger("minisgl.server")


def _nothing() -> None:
    return None


class Connection:
    __slots__ = ("_on_pause", "_on_resume", "_task", "_transport", "blocked_since", "chunked", "is_lost", "streams")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._task: asyncio.Task[Any] | None = None
        self.is_lost = False
        self.chunked = True
        self.streams = False
        self.blocked_since: float | None = None  # the loop's time since which the client has not caught up
        self._on_pause: Callable[[], None] = _nothing
        self._on_resume: Callable[[], None] = _nothing

    def cancels(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task` when the client goes away."""
        self._task = task
        if self.is_lost and task is not None:
            task.cancel()

    @contextmanager
    def stream(self, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> Iterator[None]:
        """While a stream is written; these are called when the client lags behind, and when it has caught up."""
        self.streams = True
        self._on_pause, self._on_resume = on_pause, on_resume
        try:
            yield
        finally:
            self.streams = False
            self._on_pause = self._on_resume = _nothing

    def write(self, chunk: bytes) -> None:
        """A chunk of an answer that has begun (RFC 9112, 7.1), for HTTP/1.0 the bytes alone. Never blocks; nothing may
        be written while paused but what is ready already."""
        if not self.is_lost and chunk:
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.chunked else chunk)

    # ------------------------------------------------------------------------------------------- called by http.py

    def lost(self) -> None:
        self.is_lost = True
        if self._task is not None:
            self._task.cancel()

    def paused(self, now: float) -> None:
        self.blocked_since = now
        self._on_pause()

    def resumed(self) -> None:
        self.blocked_since = None
        self._on_resume()


class Crowd:
    """How many connections there may be: in all, and of one address three quarters of that, so that no client alone
    keeps all others out. The gateway counts alike (`rust/minisgl-gateway/src/http/crowd.rs`)."""

    MOST = 16_384
    OTHER_DESCRIPTORS = 100

    def __init__(self, most: int | None = None) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = self.MOST if limit == resource.RLIM_INFINITY else max(0, limit - self.OTHER_DESCRIPTORS) // 2
        self._most = min(self.MOST, free) if most is None else most
        self._num_open = 0
        self._open: dict[str, int] = {}  # by address

    def enter(self, address: str) -> bool:
        """Whether there is room for one more. One that came in must `leave`."""
        own = self._open.get(address, 0)
        if self._num_open >= self._most or own >= -(-3 * self._most // 4):
            return False
        self._num_open += 1
        self._open[address] = own + 1
        return True

    def leave(self, address: str) -> None:
        self._num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
