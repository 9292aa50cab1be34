"""Clients that stop reading their stream: dropped after a time, with a log line.

Keeps true: what a stream has not sent is bounded (its next piece, and the tokens of its requests, which end); nobody
waits for a slow client but its own stream.
Doesn't know: what is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_log = logging.getLogger("minisgl.server")


@dataclass(slots=True, eq=False)
class Stream:
    """`blocked_since` is the loop's time at which its current write began, None while it writes nothing."""

    request_id: str
    abort: Callable[[], None]
    blocked_since: float | None = None


class SlowClients:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._streams: set[Stream] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.num_dropped = 0

    @contextmanager
    def watch(self, request_id: str, abort: Callable[[], None]) -> Iterator[Stream]:
        """For the life of a stream. `abort` closes its connection without waiting for the client."""
        stream = Stream(request_id, abort)
        self._streams.add(stream)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def _sweep(self) -> None:
        """One task for all streams, as long as there are any: a timer for every write would cost more than the
        write."""
        loop = asyncio.get_running_loop()
        while self._streams:
            await asyncio.sleep(self._timeout_s / 4)
            now = loop.time()
            for stream in list(self._streams):
                if stream.blocked_since is not None and now - stream.blocked_since > self._timeout_s:
                    self._streams.discard(stream)
                    self.num_dropped += 1
                    _log.warning(
                        "%s: dropped: its client has read nothing for %.1f s (--slow-client-timeout)",
                        stream.request_id,
                        now - stream.blocked_since,
                    )
                    stream.abort()
        self._sweeper = None
