"""One request's way to its client, below ASGI: pieces of a stream go straight into the transport's buffer.

Keeps true: a client that goes away cancels the task that answers it, at the transport's event; a client that does not
read is known at once, so that nobody formats what cannot be sent.
Doesn't know: what is sent, and to which request of the connection the transport belongs now (http.py does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CONNECTION = "minisgl.connection"
"""Key of the ASGI scope; http.py puts it there."""


def _nothing() -> None:
    return None


class Connection:
    __slots__ = ("_on_pause", "_on_resume", "_task", "_transport", "blocked_since", "chunked", "is_lost")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._task: asyncio.Task[Any] | None = None
        self.is_lost = False
        self.chunked = True
        self.blocked_since: float | None = None  # the loop's time since which the client has not caught up
        self._on_pause: Callable[[], None] = _nothing
        self._on_resume: Callable[[], None] = _nothing

    def cancels(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task` when the client goes away."""
        self._task = task
        if self.is_lost and task is not None:
            task.cancel()

    @contextmanager
    def tells(self, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> Iterator[None]:
        """Call these when the client lags behind, and when it has caught up."""
        self._on_pause, self._on_resume = on_pause, on_resume
        try:
            yield
        finally:
            self._on_pause = self._on_resume = _nothing

    def write(self, piece: bytes) -> None:
        """A chunk of an answer that has begun (RFC 9112, 7.1), for HTTP/1.0 the bytes alone. Never blocks; nothing may
        be written while paused but what is ready already."""
        if not self.is_lost and piece:
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)

    def abort(self) -> None:
        """Close it without waiting for the client to read."""
        self._transport.abort()

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
