"""A closed loop of streaming chat clients in one event loop, light enough to measure a server on the same machine.

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
    return uvloop.run(_closed_loop(url, bodies, concurrency))


async def _closed_loop(url: str, bodies: Sequence[dict[str, object]], concurrency: int) -> list[Answer]:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    requests = [_request(f"{host}:{port}", body) for body in reversed(bodies)]
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answers: list[Answer] = []
    clients = []

    def broke(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a client's own code must end the run, not leave it waiting."""
        if not done.done():
            done.set_exception(context.get("exception") or RuntimeError(context["message"]))

    asyncio.get_running_loop().set_exception_handler(broke)
    try:
        for _ in range(min(concurrency, len(bodies))):
            _, client = await asyncio.get_running_loop().create_connection(
                lambda: _Client(requests, answers, len(bodies), done), host, port
            )
            clients.append(client)
        await done
    finally:
        for client in clients:
            client.close()
    return answers


def _request(host: str, body: dict[str, object]) -> bytes:
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class _Client(asyncio.Protocol):
    """One connection: sends the next request when an answer is whole."""

    def __init__(self, requests: list[bytes], answers: list[Answer], total: int, done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._answers = answers
        self._total = total
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._head = b""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self._next()

    def _next(self) -> None:
        self._head, self._tail = b"", b""
        if not self._requests:
            self._answer = None
            return
        assert self._transport is not None
        self._answer = Answer(time.perf_counter())
        self._transport.write(self._requests.pop())

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        if answer is None or self._done.done():
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
        if b"data: [DONE]" not in self._tail or usage is None:
            self._fail("a request failed: its stream ended before its time")
            return
        answer.num_tokens = int(usage[1])
        self._answers.append(answer)
        if len(self._answers) == self._total:
            self._done.set_result(None)
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._fail(f"a request failed: the connection was lost: {error or 'closed by the server'}")

    def _fail(self, reason: str) -> None:
        if not self._done.done():
            self._done.set_exception(RequestFailed(reason))

    def close(self) -> None:
        self._answer = None
        if self._transport is not None:
            self._transport.abort()
