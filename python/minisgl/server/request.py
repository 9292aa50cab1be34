"""One HTTP request: its body, from the first byte to its turn, and what the access log gets of it. Large bodies are
taken in turns, so that all that is in hand of them at once is bounded, whatever is sent.

Keeps true: turns are taken in order, and given back by whoever is cancelled; a body of at most `SMALL_BYTES` waits for
nobody; who sends slowly keeps others waiting for `--slow-client-timeout` at most; a body over the limit is refused
without being held; no prompt and no output is logged unless that was asked for.
Doesn't know: what a body says, where log lines go.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive

from minisgl.config import Limits
from minisgl.server.errors import ApiError

REQUEST = "minisgl.request"
"""Key of the ASGI scope; middleware.py puts it there."""
SMALL_BYTES = 1 << 16
MAX_LOGGED_CHARS = 4096
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_log = logging.getLogger("minisgl.access")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


@dataclass(slots=True)
class HttpRequest:
    """Filled in on the way. `arrival_time` is `time.monotonic`; tokens count all prompts and choices."""

    method: str
    path: str
    request_id: str
    content_length: int | None = None
    body: bytearray = field(default_factory=bytearray)  # what has come, until it is parsed
    arrival_time: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    prompt: str | None = None  # only with --log-prompts
    output: str | None = None
    _turns: Turns | None = None  # whose turn it has, while it has one
    _held: int = 0

    @classmethod
    def of(cls, method: str, path: str, headers: Mapping[bytes, bytes]) -> HttpRequest:
        """With the client's own id if it can stand in a log and a header, else a new one."""
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        length = headers.get(b"content-length", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        return cls(method, path, request_id, int(length) if length.isdigit() else None)

    # -------------------------------------------------------------------------------------------------------- body

    @property
    def is_large(self) -> bool:
        return self._turns is not None

    async def read(self, receive: Receive, turns: Turns, limits: Limits) -> None:
        """The whole body. Raises `ApiError` 413 over the limit, 408 if it comes too slowly, and `ClientGone`."""
        max_bytes, timeout_s, announced = limits.max_body_bytes, limits.slow_client_timeout, self.content_length
        if announced is not None and announced > max_bytes:
            raise _too_large(announced, max_bytes)
        clock = asyncio.get_running_loop().time
        if announced is not None and announced > SMALL_BYTES:
            await self._wait_for_turn(turns, announced)
        began = clock()
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await receive()
            except TimeoutError as error:
                raise _too_slow(f"nothing came for {timeout_s:g} s after {len(self.body)} bytes") from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.body += message.get("body", b"")
            size = len(self.body)
            if size > max_bytes:
                raise _too_large(size, max_bytes)
            if not message.get("more_body", False):
                return
            if size > SMALL_BYTES and not self.is_large:  # its length was not announced
                await self._wait_for_turn(turns, max_bytes)
                began = clock()
            if self.is_large and turns.num_waiting and clock() - began > timeout_s:
                raise _too_slow(f"{size} bytes came in {timeout_s:g} s, and others wait")

    async def _wait_for_turn(self, turns: Turns, size: int) -> None:
        self._held = await turns.take(size)
        self._turns = turns

    def take_body(self) -> bytearray:
        """The bytes, once."""
        found, self.body = self.body, bytearray()
        return found

    def body_done(self) -> None:
        """Whatever is kept of it from here on is small: the turn ends. Idempotent."""
        self.body = bytearray()
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.give(self._held)

    # --------------------------------------------------------------------------------------------------------- log

    def line(self) -> dict[str, Any]:
        """The fields of the access line; those that mean nothing for this request are left out."""
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status or "gone",  # the client left before an answer began
            "e2e_s": round(time.monotonic() - self.arrival_time, 4),
        }
        if self.prompt_tokens:
            found |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "generated_tokens": self.generated_tokens,
            }
        if self.ttft_s is not None:
            found["ttft_s"] = round(self.ttft_s, 4)
        if self.finish_reasons:
            found["finish_reason"] = ",".join(sorted(set(self.finish_reasons)))
        for name in ("error", "prompt", "output"):
            if (value := getattr(self, name)) is not None:
                found[name] = value[:MAX_LOGGED_CHARS]
        return found

    def log(self) -> None:
        _log.info("request", extra={"fields": self.line()})


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


def _too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(413, f"body: {size} bytes or more: the limit is {max_bytes}", code="body_too_large")


def _too_slow(reason: str) -> ApiError:
    error = ApiError(408, f"body: {reason}", code="body_timeout")
    error.headers["connection"] = "close"
    return error
