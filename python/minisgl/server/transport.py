"""Between handlers and the ASGI server: bodies under a limit, disconnects as events, streams.

Keeps true: a client that goes away cancels its handler at the transport's event, streaming or not; a body over the
limit is refused without being held; a stream's status waits for its first piece: an early failure is a proper status.
Doesn't know: what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from minisgl.server.errors import SERVER, ApiError
from minisgl.server.gate import RECORD, SLOW_CLIENTS
from minisgl.server.slow_clients import SlowClients

T = TypeVar("T")


ABORT = "minisgl.abort"
"""Key of the ASGI scope: closes the connection without waiting for the client to read (http.py puts it there)."""


def _nothing() -> None:
    return None


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


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client goes away first, cancel it and raise `ClientGone`. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            if not one.done():
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await one


async def _disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class StreamResponse(Response):
    """Sends the pieces of `pieces` as they come. An `ApiError` before the first one is a normal error answer; a later
    one is the last piece, made by `error_piece`."""

    def __init__(self, pieces: AsyncIterator[bytes], media_type: str, error_piece: Callable[[ApiError], bytes]) -> None:
        self._pieces = pieces
        self._error_piece = error_piece
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        abort: Callable[[], None] = scope.get(ABORT, _nothing)
        slow_clients: SlowClients = scope[SLOW_CLIENTS]
        with contextlib.suppress(ClientGone), slow_clients.watch(scope[RECORD].request_id, abort) as stream:
            clock = asyncio.get_running_loop().time

            async def watched(message: Message) -> None:
                stream.blocked_since = clock()
                await send(message)
                stream.blocked_since = None

            await unless_gone(receive, self._run(scope, receive, watched))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for piece in self._pieces:
                if not started:
                    started = True
                    await self._start(send)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            scope[RECORD].error = error.body["error"]["code"]
            if not started:
                await error.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": self._error_piece(error), "more_body": True})
        finally:
            await self._close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _close(self) -> None:
        """Run the generator's own clean-up now, not when the collector finds it."""
        if (aclose := getattr(self._pieces, "aclose", None)) is not None:
            await aclose()


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
    "ABORT",
    "SERVER",
    "SSE_DONE",
    "ClientGone",
    "NoResponse",
    "StreamResponse",
    "json_line",
    "json_response",
    "read_body",
    "sse",
    "sse_error",
    "unless_gone",
]
