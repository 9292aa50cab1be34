"""Clients that stop reading their stream: dropped after a time, with a log line.

Keeps true: what a stream has not sent is bounded (its next piece, and the tokens of its requests, which end); nobody
waits for a slow client but its own stream.
Doesn't know: what is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from minisgl.server.connection import Connection

_log = logging.getLogger("minisgl.server")


class SlowClients:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._streams: dict[Connection, str] = {}  # and the id of the request
        self._sweeper: asyncio.Task[None] | None = None
        self.num_dropped = 0

    @contextmanager
    def watch(self, request_id: str, connection: Connection) -> Iterator[None]:
        """For the life of a stream."""
        self._streams[connection] = request_id
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        try:
            yield
        finally:
            self._streams.pop(connection, None)

    async def _sweep(self) -> None:
        """One task for all streams, as long as there are any: a timer for every write would cost more than the
        write."""
        loop = asyncio.get_running_loop()
        while self._streams:
            await asyncio.sleep(self._timeout_s / 4)
            now = loop.time()
            for connection, request_id in list(self._streams.items()):
                since = connection.blocked_since
                if since is not None and now - since > self._timeout_s:
                    del self._streams[connection]
                    self.num_dropped += 1
                    _log.warning(
                        "%s: dropped: its client has read nothing for %.1f s (--slow-client-timeout)",
                        request_id,
                        now - since,
                    )
                    connection.abort()
        self._sweeper = None
