"""Between handlers and the ASGI server: answers and streams.

Keeps true: a stream's status waits for its first piece: an early failure is a proper status; what a slow client has not
read is bounded.
Doesn't know: what is sent.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.frontend.output_processor import Delta
from minisgl.server.connection import CONNECTION, Connection
from minisgl.server.errors import SERVER, ApiError, internal_error
from minisgl.server.gate import RECORD, SLOW_CLIENTS
from minisgl.server.generation import Generation
from minisgl.server.slow_clients import SlowClients

_log = logging.getLogger("minisgl.server")


class NoResponse(Response):
    """For a client that is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return None


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
            connection.tells(generation.pause, generation.resume),
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
    "NoResponse",
    "StreamResponse",
    "json_bytes",
    "json_line",
    "json_response",
    "sse",
    "sse_error",
]
