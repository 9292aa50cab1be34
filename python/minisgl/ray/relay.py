"""The path of one request to a replica and back, and to another replica if that one is lost.

Invariants: a stream is passed on up to the last mark, or to its proper end, so that the next replica can continue it
(`server/core/resume.py`); a response that is no stream is passed on when it is complete; a request that no replica
answers ends with an error that says why, after `retry_s` without progress.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import msgspec

from minisgl.config import Silence
from minisgl.server.core.errors import ApiError, last_event
from minisgl.server.core.passing import Headers, Lost
from minisgl.server.core.resume import LINE, MARKS, Mark, Said
from minisgl.server.core.streams import STREAMS, ping_of

RESUMABLE = STREAMS
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0
_BUSY = (429, 503)
_log = logging.getLogger("minisgl.ray")


class Call(msgspec.Struct, frozen=True):
    """A request to a replica. `path` includes the query; `said` is sent before the body (`server/core/resume.py`)."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""
    said: bytes = b""


class Header(msgspec.Struct, frozen=True):
    """The status and headers of a response."""

    status: int
    headers: Headers


Attempt = Callable[[Call], AsyncIterator[Header | bytes]]
"""Sends a request to a replica and yields the response's header, then its body in pieces. Raises `Lost`."""


class MarkReader:
    """A reader that removes the marks from one server's stream."""

    def __init__(self) -> None:
        self._closed = b""  # bytes before the last mark
        self._open = b""

    def push(self, data: bytes) -> list[Mark]:
        """Add received bytes and return the marks that are complete now."""
        self._open += data
        marks = []
        while (at := self._find()) >= 0 and (end := self._open.find(b"\n", at)) >= 0:
            marks.append(msgspec.json.decode(self._open[at + len(LINE) : end], type=Mark))
            self._closed += self._open[:at]
            self._open = self._open[end + 1 :]
        return marks

    def _find(self) -> int:
        if self._open.startswith(LINE):
            return 0
        at = self._open.find(b"\n" + LINE)
        return at if at < 0 else at + 1

    def take(self) -> bytes:
        """Return and remove the bytes before the last mark, which may be passed on."""
        data, self._closed = self._closed, b""
        return data

    def rest(self) -> bytes:
        """Return all remaining bytes, also after the last mark. Call it when the stream has ended properly."""
        data, self._open = self.take() + self._open, b""
        return data


class Relay:
    """A request, retried for `retry_s` seconds without progress; its stream is never silent for `longest_s`."""

    def __init__(self, asked: Call, attempt: Attempt, retry_s: float, longest_s: float = Silence().longest) -> None:
        self._asked = asked
        self._attempt = attempt
        self._retry_s = retry_s
        self._longest_s = longest_s
        self._path = asked.path.partition("?")[0].rstrip("/")
        self._marks = asked.method == "POST" and self._path in RESUMABLE
        self._said: Said | None = None
        self._head: Header | None = None  # passed on
        self._is_stream = False
        self._progress = time.monotonic()
        self.num_lost = 0  # replicas lost before the end

    async def answer(self) -> AsyncIterator[Header | bytes]:
        """Yield the response for the client. A stream with marks gets pings while no replica serves it. Raises `Lost`
        if a response that has begun cannot be continued."""
        async with aclosing(self._answer()) as parts:  # type: ignore[type-var]
            while True:
                part = asyncio.ensure_future(anext(parts))
                try:
                    while not (await asyncio.wait({part}, timeout=self._longest_s))[0]:
                        if self._head is not None and self._marks:
                            yield ping_of(self._path, self._kind())
                    yield part.result()
                except StopAsyncIteration:
                    return
                finally:
                    part.cancel()
                    await asyncio.wait({part})

    async def _answer(self) -> AsyncIterator[Header | bytes]:
        wait_s = FIRST_WAIT_S
        while True:
            before = self._progress
            try:
                async for part in self._once():
                    yield part
                return
            except Lost as error:  # a stream that has only sent pings starts again
                self.num_lost += 1
                _log.warning("%s %s: %s", self._asked.method, self._path, error)
                if self._head is not None and not self._marks:
                    raise  # an unmarked response that has begun cannot continue
                if not self._may_go_on():
                    for part in self._give_up(ApiError(503, str(error), kind="server_error", code="replica_lost")):
                        yield part
                    return
            wait_s = FIRST_WAIT_S if self._progress > before else min(LONGEST_WAIT_S, 2 * wait_s)
            await asyncio.sleep(wait_s)

    def _kind(self) -> str:
        """Return the content type of the response that has begun, or ""."""
        head = self._head
        return "" if head is None else dict(head.headers).get(b"content-type", b"").decode("latin-1")

    def _may_go_on(self) -> bool:
        return time.monotonic() - self._progress < self._retry_s

    def _give_up(self, error: ApiError) -> list[Header | bytes]:
        body = error.body_for(self._path)
        if self._head is None:
            head = Header(error.status, [(b"content-type", b"application/json"), (b"retry-after", b"1")])
            return [head, msgspec.json.encode(body)]
        return [last_event(self._path, body, self._kind())]

    def _next(self) -> Call:
        if not self._marks:
            return self._asked
        said = b"" if self._said is None else msgspec.json.encode(self._said)
        headers = [*self._asked.headers, (MARKS, b"%d" % len(said))]
        return msgspec.structs.replace(self._asked, headers=headers, said=said)

    async def _once(self) -> AsyncIterator[Header | bytes]:
        """Send the request to one replica and yield its part of the response. Raises `Lost`."""
        reader, head = MarkReader(), None
        async with aclosing(self._attempt(self._next())) as parts:  # type: ignore[type-var]
            async for piece in parts:
                if isinstance(piece, Header):
                    head = self._check(piece)
                    if not self._marks:
                        self._head = head
                        yield head
                elif not self._marks:
                    yield piece
                else:
                    reasons = [self._take(mark) for mark in reader.push(piece)]
                    if data := reader.take():
                        for part in self._begun(head, data):
                            yield part
                    if reason := "".join(reasons):
                        raise Lost(reason)
        if head is None:
            raise Lost("the replica did not answer")
        if self._marks and (data := reader.rest()):
            for part in self._begun(head, data):
                yield part

    def _check(self, head: Header) -> Header:
        """Return the header of a response. Raises `Lost` if another replica may answer better."""
        if self._marks and head.status == 503:
            raise Lost("the replica's server does not serve (503)")
        if self._head is not None and head.status != 200:
            reason = f"the stream could not be taken up: the replica's server answered {head.status}"
            if head.status not in _BUSY:
                self._progress = -self._retry_s  # another replica would refuse too: give up
            raise Lost(reason)
        return head

    def _begun(self, head: Header | None, data: bytes) -> list[Header | bytes]:
        if self._head is not None or head is None:
            return [data]
        self._head = head
        return [head, data]

    def _take(self, mark: Mark) -> str:
        """Process a mark and return why the replica's stream ends here, or "" if it goes on."""
        if mark.origin is not None:
            self._said = Said(mark.origin, [])
        if self._said is not None and mark.tokens:
            self._said.turns.append(mark.tokens)
            self._progress = time.monotonic()  # pings are no progress
        return mark.lost
