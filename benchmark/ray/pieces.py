"""How many tokens a server writes at once: the chunks of streamed answers, as they stand on the wire.

A client that is slow reads several chunks at once; the chunks themselves stay what the server wrote.

Invariants: an answer that is not whole, or not chunked, is an error, not a figure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

EVENT = b"data: {"
WAIT_S = 300.0
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True, slots=True)
class Pieces:
    """Of all streams together; chunks are those with events."""

    chunks: int
    events: int
    tokens: int

    @property
    def tokens_per_chunk(self) -> float:
        return self.tokens / self.chunks

    @property
    def events_per_chunk(self) -> float:
        return self.events / self.chunks


def chunks_of(answer: bytes) -> list[bytes]:
    """The body of an HTTP/1.1 answer that ended well, as it was chunked. Raises `ValueError`."""
    head, end, rest = answer.partition(b"\r\n\r\n")
    lines = [line.lower().replace(b" ", b"") for line in head.split(b"\r\n")]
    if not end or b"200" not in lines[0] or b"transfer-encoding:chunked" not in lines:
        raise ValueError(f"no chunked answer with status 200: {head[:200]!r}")
    found = []
    while True:
        size, end, rest = rest.partition(b"\r\n")
        length = int(size.partition(b";")[0] or b"-", 16) if end else -1
        if length < 0 or rest[length : length + 2] != b"\r\n":
            raise ValueError(f"an answer that is cut, after {len(found)} chunks")
        if not length:
            return found
        found.append(rest[:length])
        rest = rest[length + 2 :]


def pieces_of(answers: Sequence[bytes]) -> Pieces:
    """Raises `ValueError`."""
    chunks = events = tokens = 0
    for answer in answers:
        parts = chunks_of(answer)
        chunks += sum(EVENT in part for part in parts)
        events += sum(part.count(EVENT) for part in parts)
        told = _TOKENS.findall(b"".join(parts))
        if not told:
            raise ValueError("an answer that does not say how many tokens it has")
        tokens += int(told[-1])
    return Pieces(chunks, events, tokens)


async def _ask(url: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        return await reader.read()
    finally:
        writer.close()


async def _ask_all(url: str, bodies: Sequence[bytes]) -> list[bytes]:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*(_ask(url, body) for body in bodies))


def look_at_pieces(url: str, bodies: Sequence[bytes]) -> Pieces:
    """Of as many streams at once as there are bodies."""
    return pieces_of(asyncio.run(_ask_all(url, bodies)))
