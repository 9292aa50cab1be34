"""Proxies requests to another server, and its responses back, as bytes: from the front of several models to the server
of one (`registry/front.py`), and from a replica to its server (`ray/replica.py`).

Invariants: bodies are neither changed nor parsed; of a chunked stream only whole chunks are forwarded, as the server
wrote them, so that an aborted stream ends between two events; input is not read faster than the client takes it, so
that a slow client holds up its own stream alone; a disconnect resets the connection to the server, which ends the
request there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import httptools

from minisgl.server.core.http import Connection

Headers = list[tuple[bytes, bytes]]
Address = tuple[str, int]
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect", b"proxy-connection"}
)
WHO = frozenset({b"host", b"authorization", b"x-api-key"})
"""Headers that identify the caller."""
OF_THIS_SERVER = frozenset({b"date", b"server"})
"""Response headers that this server writes itself."""
CONNECT_TIMEOUT_S = 10.0


class Lost(Exception):
    """The connection to a server failed. The message continues a sentence that begins with the server's name."""


class Answer(asyncio.Protocol):
    """Client connection for one request to a server. `head` is done when status and headers have arrived; the body is
    read by one of `whole`, `pieces` and `into`."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.headers: Headers = []
        self.is_chunked = False
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []  # received and not yet read
        self._news = asyncio.Event()  # set when parts or the end arrive
        self._chunk: list[bytes] = []  # pieces of the incomplete chunk
        self._connection: Connection | None = None

    # ------------------------------------------------------------------------------------------- called by its reader

    async def whole(self) -> bytes:
        """Return the complete body of the server's response. Raises `Lost`."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body of the server's response as it arrives, joining parts that wait. Raises `Lost` after them."""
        while self._parts or not self.done.done():
            if self._parts:
                parts, self._parts = self._parts, []
                yield b"".join(parts)
            else:
                self._news.clear()
                self._resume()
                await self._news.wait()
        await self.done

    async def into(self, connection: Connection) -> None:
        """Forward the body, as it arrives, to a client's connection, whose response has begun. Raises `Lost`."""
        self._connection = connection
        with connection.stream(self._pause, self._resume):
            self._resume()  # first, since writing a part may pause it again
            parts, self._parts = self._parts, []
            for part in parts:
                connection.write(part)
            await self.done

    def close(self) -> None:
        for one in (self.head, self.done):
            one.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # --------------------------------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"gave an answer that is no HTTP: {error}")
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("ended the connection" + (f": {error}" if error else ""))
        self._news.set()

    def _fail(self, reason: str) -> None:
        for one in (self.head, self.done):
            if not one.done():
                one.set_exception(Lost(reason))
                one.exception()  # mark as retrieved: the waiter of the other future raises it
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------------- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim response
            self.headers = []
            return
        self.status = status
        self.is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self.headers = [one for one in self.headers if one[0] not in HOP_BY_HOP | OF_THIS_SERVER]
        if not self.head.done():
            self.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        if self.is_chunked:
            self._chunk.append(body)
        else:
            self._pass(body)

    def on_chunk_complete(self) -> None:
        if self._chunk:
            self._pass(self._chunk[0] if len(self._chunk) == 1 else b"".join(self._chunk))
            self._chunk = []

    def on_message_complete(self) -> None:
        if self.status and not self.done.done():
            self.done.set_result(None)

    def _pass(self, body: bytes) -> None:
        if self._connection is None:
            self._parts.append(body)
            self._pause()
        else:
            self._connection.write(body)


def request_bytes(method: str, path: bytes, headers: Headers, body: bytes | bytearray = b"") -> bytes:
    """Return the bytes of an HTTP/1.1 request for one connection. `path`: as the client sent it, with its query. HEAD
    is sent as GET; the caller leaves the body out."""
    method = "GET" if method == "HEAD" else method
    passed = [one for one in headers if one[0] not in HOP_BY_HOP and one[0] != b"content-length"]
    if all(name != b"host" for name, _ in passed):  # HTTP/1.0, or a request of this server itself
        passed.append((b"host", b"localhost"))
    lines = [b"%b %b HTTP/1.1" % (method.encode(), path), *(b"%b: %b" % one for one in passed)]
    if body or method not in ("GET", "DELETE"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"connection: close", b"", b""]) + body


async def ask(address: Address, request: bytes) -> Answer:
    """Connect, send the request and return when the response's headers have arrived. Raises `Lost`."""
    loop = asyncio.get_running_loop()
    answer = Answer(request)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.create_connection(lambda: answer, *address)
    except (OSError, TimeoutError) as error:
        raise Lost(f"cannot be reached: {error or 'it does not answer'}") from error
    try:
        await answer.head
    except BaseException:
        answer.close()
        raise
    return answer


async def ask_whole(address: Address, request: bytes, timeout_s: float | None = None) -> tuple[int, Headers, bytes]:
    """Send the request and return status, headers and body of the response. Raises `Lost`, also after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            with contextlib.closing(await ask(address, request)) as answer:
                return answer.status, answer.headers, await answer.whole()
    except TimeoutError as error:
        raise Lost(f"did not answer within {timeout_s:g} s") from error
