"""Between handlers and the ASGI server: bodies under a limit, answers, streams.

Keeps true: a body over the limit is refused without being held; a stream's status waits for its first piece: an early
failure is a proper status; what a slow client has not read is bounded.
Doesn't know: what is sent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.server.connection import CONNECTION, Connection
from minisgl.server.errors import SERVER, ApiError, internal_error
from minisgl.server.gate import RECORD, SLOW_CLIENTS
from minisgl.server.generation import Delta, Generation
from minisgl.server.slow_clients import SlowClients

_log = logging.getLogger("minisgl.server")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class NoResponse(Response):
    """For a client that is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return None


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body; `ApiError` 413 over the limit, 408 if nothing of it comes for `timeout_s`."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    parts, size = [], 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await request.receive()
        except TimeoutError as error:
            raise _too_slow(size, timeout_s) from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(413, f"body: {size} bytes or more: the limit is {max_bytes}", code="body_too_large")


def _too_slow(size: int, timeout_s: float) -> ApiError:
    error = ApiError(408, f"body: nothing came for {timeout_s:g} s after {size} bytes", code="body_timeout")
    error.headers["connection"] = "close"
    return error


class Pieces(Protocol):
    """The body of a stream, made piece by piece."""

    def begin(self) -> Generation:
        """Submit to the engine. Raises `ApiError`."""

    def piece(self, generation: Generation, deltas: list[Delta]) -> bytes: ...

    def end(self, generation: Generation) -> bytes:
        """What comes after every choice has ended."""

    def error(self, error: ApiError) -> bytes:
        """The last piece instead, if a choice fails."""


class StreamResponse(Response):
    """Sends pieces as tokens come, straight into the connection. An `ApiError` before the first one is a normal error
    answer."""

    def __init__(self, pieces: Pieces, media_type: str) -> None:
        self._pieces = pieces
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            with self._pieces.begin() as generation:
                first = await generation.first()
                started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._stream(scope, generation, first)
                last = self._pieces.end(generation)
        except ApiError as error:
            scope[RECORD].error = error.body["error"]["code"]
            if not started:
                await error.response()(scope, receive, send)
                return
            last = self._pieces.error(error)
        except Exception as error:
            if not started:
                raise
            _log.exception("%s: a bug", scope[RECORD].request_id)
            last = self._pieces.error(internal_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _stream(self, scope: Scope, generation: Generation, first: list[Delta]) -> None:
        connection: Connection = scope[CONNECTION]
        slow_clients: SlowClients = scope[SLOW_CLIENTS]
        piece, write = self._pieces.piece, connection.write
        with (
            slow_clients.watch(scope[RECORD].request_id, connection),
            connection.tells(generation.hold, generation.resume),
        ):
            write(piece(generation, first))
            await generation.follow(lambda deltas: write(piece(generation, deltas)))


json_bytes = msgspec.json.Encoder().encode


def sse(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def sse_error(error: ApiError) -> bytes:
    return sse(error.body) + SSE_DONE


def json_line(data: object) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def json_response(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


__all__ = [
    "SERVER",
    "SSE_DONE",
    "ClientGone",
    "NoResponse",
    "StreamResponse",
    "json_bytes",
    "json_line",
    "json_response",
    "read_body",
    "sse",
    "sse_error",
]
