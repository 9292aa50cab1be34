"""Bodies from their first byte until their prompts are token ids: large ones in turns, so that all that is in hand of
them at once is bounded, whatever is sent.

Keeps true: turns are taken in order, and given back by whoever is cancelled; a body of at most `SMALL_BYTES` waits for
nobody; who sends slowly keeps others waiting for `--slow-client-timeout` at most; a body over the limit is refused
without being held.
Doesn't know: what a body says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.requests import Request

from minisgl.config import Limits
from minisgl.server.errors import ApiError

SMALL_BYTES = 1 << 16


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Payload:
    """One request's body. Its turn ends with `done`, or when the handler does."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._held = 0
        self._data = bytearray()

    @property
    def size(self) -> int:
        """What has come."""
        return len(self._data)

    @property
    def is_large(self) -> bool:
        return self._held > 0

    def take(self) -> bytearray:
        """The bytes, once."""
        found, self._data = self._data, bytearray()
        return found

    def begin(self, size: int) -> str:
        """As text, of about `size` bytes."""
        return self._data[:size].decode(errors="replace")

    def add(self, part: bytes) -> None:
        self._data += part

    async def wait_for_turn(self, size: int) -> None:
        self._held = await self._turns.take(size)

    def done(self) -> None:
        """Whatever is kept of it from here on is small. Idempotent."""
        self._data = bytearray()
        held, self._held = self._held, 0
        if held:
            self._turns.give(held)


class Turns:
    """`most` bytes in hand at once, first come, first served. What is larger than that goes alone. When nothing is in
    hand any more, `when_idle` is called with the bytes that were."""

    def __init__(self, most: int, when_idle: Callable[[int], None]) -> None:
        self._most = most
        self._when_idle = when_idle
        self._held = 0
        self._given = 0  # since it was idle
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """In hand."""
        return self._held

    async def take(self, size: int) -> int:
        """Returns what is to be given back."""
        size = min(size, self._most)
        if not self._waiting and self._held + size <= self._most:
            self._held += size
            return size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the same moment
                self.give(size)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._go_on()
            raise
        return size

    def give(self, size: int) -> None:
        self._held -= size
        self._given += size
        self._go_on()
        if not self._held:
            given, self._given = self._given, 0
            self._when_idle(given)

    def _go_on(self) -> None:
        while self._waiting and (self._waiting[0][0].done() or self._held + self._waiting[0][1] <= self._most):
            turn, size = self._waiting.popleft()
            if not turn.done():  # else cancelled
                self._held += size
                turn.set_result(None)


async def read_body(request: Request, payload: Payload, turns: Turns, limits: Limits) -> None:
    """The whole body into `payload`; `ApiError` 413 over the limit, 408 if it comes too slowly."""
    max_bytes, timeout_s = limits.max_body_bytes, limits.slow_client_timeout
    given = request.headers.get("content-length", "")
    announced = int(given) if given.isdecimal() else None
    if announced is not None and announced > max_bytes:
        raise _too_large(announced, max_bytes)
    clock = asyncio.get_running_loop().time
    if announced is not None and announced > SMALL_BYTES:
        await payload.wait_for_turn(announced)
    began = clock()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await request.receive()
        except TimeoutError as error:
            raise _too_slow(f"nothing came for {timeout_s:g} s after {payload.size} bytes") from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        payload.add(message.get("body", b""))
        if payload.size > max_bytes:
            raise _too_large(payload.size, max_bytes)
        if not message.get("more_body", False):
            return
        if payload.size > SMALL_BYTES and not payload.is_large:  # its length was not announced
            await payload.wait_for_turn(max_bytes)
            began = clock()
        if payload.is_large and turns.num_waiting and clock() - began > timeout_s:
            raise _too_slow(f"{payload.size} bytes came in {timeout_s:g} s, and others wait")


def _too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(413, f"body: {size} bytes or more: the limit is {max_bytes}", code="body_too_large")


def _too_slow(reason: str) -> ApiError:
    error = ApiError(408, f"body: {reason}", code="body_timeout")
    error.headers["connection"] = "close"
    return error
