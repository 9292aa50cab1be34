"""Streaming chat clients in one event loop, closed or open, light enough to measure a server on the same machine.

Frames are counted and never parsed, but for the usage in the last one.

Keeps true: an answer counts only if it came whole, with status 200 and as many tokens as were asked for.
Doesn't know: servers under comparison, statistics.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
PIECE = b'"content":'
TAIL = 400  # bytes of the stream's end that are kept: the usage is among them
END = b"0\r\n\r\n"  # of a chunked body


class RequestFailed(RuntimeError):
    """An answer that is no result; the text says why."""


@dataclass(slots=True)
class Answer:
    """When it was sent and when pieces with text came, in seconds; `num_tokens` as the server's usage says."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    num_tokens: int = 0


def closed_loop(url: str, bodies: Sequence[dict[str, object]], concurrency: int) -> list[Answer]:
    """Send every body to /v1/chat/completions, `concurrency` at a time; read the streams. Raises `RequestFailed`."""
    return uvloop.run(_Run(url, bodies).closed(concurrency))


def open_loop(url: str, bodies: Sequence[dict[str, object]], times_s: Sequence[float]) -> list[Answer]:
    """Send each body at its time (seconds from the start, ascending), whatever is open then. `sent` is the time it was
    due: a client that comes late counts against the server, never for it. Raises `RequestFailed`."""
    return uvloop.run(_Run(url, bodies).open(times_s))


class _Run:
    """The requests that are left, the answers that came, and clients without anything to do."""

    def __init__(self, url: str, bodies: Sequence[dict[str, object]]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._left = [_request(f"{self._host}:{self._port}", body) for body in reversed(bodies)]
        self._total = len(bodies)
        self._answers: list[Answer] = []
        self._clients: list[_Client] = []
        self._idle: list[_Client] = []
        self._open = False
        self._done: asyncio.Future[None]

    async def closed(self, concurrency: int) -> list[Answer]:
        self._begin()
        try:
            for _ in range(min(concurrency, self._total)):
                (await self._connect()).send(self._left.pop(), time.perf_counter())
            await self._done
        finally:
            self._close()
        return self._answers

    async def open(self, times_s: Sequence[float]) -> list[Answer]:
        self._begin()
        self._open = True
        began = time.perf_counter()
        try:
            for at in times_s:
                if (left := began + at - time.perf_counter()) > 0:
                    await asyncio.wait({self._done}, timeout=left)
                if self._done.done():
                    break
                client = self._idle.pop() if self._idle else await self._connect()
                client.send(self._left.pop(), began + at)
            await self._done
        finally:
            self._close()
        return self._answers

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()

        def broke(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            """An error in a client's own code must end the run, not leave it waiting."""
            self.fail(context.get("exception") or RuntimeError(context["message"]))

        loop.set_exception_handler(broke)

    async def _connect(self) -> _Client:
        client = _Client(self)
        self._clients.append(client)
        await asyncio.get_running_loop().create_connection(lambda: client, self._host, self._port)
        return client

    def _close(self) -> None:
        for client in self._clients:
            client.close()

    def take(self, client: _Client, answer: Answer) -> None:
        """An answer came whole: the next request is for this client, or it waits for its time."""
        self._answers.append(answer)
        if len(self._answers) == self._total and not self._done.done():
            self._done.set_result(None)
        elif self._open:
            self._idle.append(client)
        elif self._left:
            client.send(self._left.pop(), time.perf_counter())

    def lost(self, client: _Client) -> None:
        """A server may close a connection that nothing was asked on for a while."""
        if client in self._idle:
            self._idle.remove(client)

    def fail(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)


def _request(host: str, body: dict[str, object]) -> bytes:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class _Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def send(self, request: bytes, due: float) -> None:
        assert self._transport is not None
        self._answer, self._head, self._tail = Answer(due), b"", b""
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        if answer is None:
            return
        if not self._head.endswith(b"\r\n\r\n"):
            head, found, rest = (self._head + data).partition(b"\r\n\r\n")
            self._head, data = head + found, rest
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200 "):
                self._fail(f"a request failed: {(head + found + rest)[:400].decode(errors='replace')}")
                return
        if PIECE in self._tail[1 - len(PIECE) :] + data:  # which may be cut anywhere
            answer.pieces.append(now)
        self._tail = (self._tail + data)[-TAIL:]
        if self._tail.endswith(END):
            self._end(answer)

    def _end(self, answer: Answer) -> None:
        usage = USAGE.search(self._tail)
        if b"data: [DONE]" not in self._tail or usage is None or not answer.pieces:
            self._fail("a request failed: its stream ended before its time")
            return
        answer.num_tokens = int(usage[1])
        self._answer = None
        self._run.take(self, answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is None:
            self._run.lost(self)
        else:
            self._fail(f"a request failed: the connection was lost: {error or 'closed by the server'}")

    def _fail(self, reason: str) -> None:
        self._run.fail(RequestFailed(reason))

    def close(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()
