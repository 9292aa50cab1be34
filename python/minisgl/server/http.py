"""uvicorn around the app, on a socket that is already bound.

Keeps true: the caller owns signals and the listener; `stop` lets running answers end for a moment, then cuts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from http import HTTPStatus

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.server.errors import ApiError
from minisgl.server.transport import ABORT

GRACE_S = 2
MAX_HEAD_BYTES = 64 * 1024


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with three changes: what is no HTTP gets an error of our shape too, a request line with headers
    that never end does not fill the memory, and a head that does not come in time closes the connection."""

    head_timeout_s = 60.0
    _head_bytes = -1  # -1 outside of a head
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        self._stop_timer()
        super().on_headers_complete()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes >= 0 and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"headers: more than {MAX_HEAD_BYTES} bytes", "headers_too_large")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"not a valid HTTP request: {msg}", "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way: it must not get a second head in its middle
            return
        body = bytes(ApiError(status, message, code=code).response().body)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the supervisor handles them


class HttpServer:
    def __init__(self, app: ASGIApp, listener: socket.socket, *, head_timeout_s: float = 60.0) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=type("Protocol", (_Protocol,), {"head_timeout_s": head_timeout_s}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0.005)  # uvicorn offers no event for this

    async def stop(self, *, at_once: bool = False) -> None:
        """Take no more connections; let running answers end for `GRACE_S`, or cut them `at_once`."""
        self._server.should_exit = True
        self._server.force_exit = at_once
        if self._task is not None:
            await self._task
