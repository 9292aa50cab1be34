"""Waiting on both sides of the server: turns for large bodies, and the queue limited by --max-queued-...

Invariants: everything that waits is bounded; an owner's turns are served in order, those of several owners round-robin,
and a cancelled owner returns its turn; requests that wait in the gateway count here, from the moment in which they are
prepared.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from minisgl.config import Limits
from minisgl.frontend.output_processor import OutputProcessor
from minisgl.server.core.api_keys import KeyUse
from minisgl.server.core.errors import queue_full

if TYPE_CHECKING:
    from minisgl._rust import Gateway

MAX_WAITING = 256
"""Maximum large bodies that wait for their turn; each holds what its connection buffers."""
_Waiting = deque[tuple[asyncio.Future[None], int]]


def has_room(most: int, num_owners: int, held: int, held_by_all: int, more: int) -> bool:
    """Return true if an owner (API key) that holds `held` units may take `more` of a capacity of `most`, when all
    owners together hold `held_by_all`. An owner may always use its share, 1 / `num_owners`; beyond that it may hold at
    most as much as is free, so that one owner fills at most half of the capacity and others always find some: the
    dynamic threshold of Choudhury and Hahne (1998), with factor 1. A larger request is allowed while nothing else is
    held. The capacity may be exceeded by a factor of two at most. A single owner may use all of it."""
    if not held_by_all:
        return True
    if num_owners < 2:
        return held_by_all + more <= most
    return held + more <= max(1, most // num_owners, most - held_by_all)


class Turns:
    """Limits the bytes of large bodies in memory to `most`: first come, first served, round-robin between owners (API
    keys). A larger body is processed alone. When all bytes are given back, `when_idle` is called with their total."""

    def __init__(
        self, most: int, when_idle: Callable[[int], None] = lambda _: None, *, what: str = "large request bodies"
    ) -> None:
        self._most = most
        self._when_idle = when_idle
        self._what = what  # for errors
        self._held = 0
        self._given = 0  # bytes given back since it was idle
        self._waiting: dict[int, _Waiting] = {}  # by owner; the first owner has the next turn

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of large request bodies that are held in memory."""
        return self._held

    async def take(self, size: int, owner: int = 0) -> int:
        """Wait for a turn of `size` bytes; returns the bytes to `give` back. Raises `ApiError` 429 if `MAX_WAITING`
        others wait, or when that many wait later, most of them of this owner."""
        size = min(size, self._most)
        if not self._waiting and self._held + size <= self._most:
            self._held += size
            return size
        if self.num_waiting >= MAX_WAITING:
            self._make_room(owner)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.setdefault(owner, deque()).append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # granted or rejected in the same moment
                if turn.exception() is None:
                    self.give(size)
            elif entry in (waiting := self._waiting.get(owner, deque())):
                waiting.remove(entry)
                if not waiting:
                    del self._waiting[owner]
                self._grant_next()
            raise
        return size

    @contextlib.asynccontextmanager
    async def turn(self, size: int = 1, owner: int = 0) -> AsyncIterator[None]:
        """Hold a turn during the `with`. Raises as `take`."""
        held = await self.take(size, owner)
        try:
            yield
        finally:
            self.give(held)

    def _make_room(self, owner: int) -> None:
        """Reject the newest waiting body of the owner with most of them. Raises `ApiError` 429 if that is `owner`."""
        full = queue_full(f"{self.num_waiting} {self._what} are waiting")
        waiting = max(self._waiting.values(), key=len)
        if len(waiting) <= len(self._waiting.get(owner, ())) + 1:
            raise full
        turn, _ = waiting.pop()
        if not turn.done():
            turn.set_exception(full)

    def give(self, size: int) -> None:
        self._held -= size
        self._given += size
        self._grant_next()
        if not self._held:
            given, self._given = self._given, 0
            self._when_idle(given)

    def _grant_next(self) -> None:
        while self._waiting:
            owner, waiting = next(iter(self._waiting.items()))
            turn, size = waiting[0]
            if not turn.done() and self._held + size > self._most:
                return
            waiting.popleft()
            del self._waiting[owner]
            if waiting:
                self._waiting[owner] = waiting  # to the end of the rotation
            if not turn.done():  # else it was cancelled
                self._held += size
                turn.set_result(None)


class Queue:
    """Waiting requests here and in the gateway: those whose prompts are being encoded or that have no row in the
    engine. Bodies that wait for a turn have a limit of their own, since small requests need no turn."""

    def __init__(self, processor: OutputProcessor, limits: Limits, keys: KeyUse, gateway: Gateway | None) -> None:
        self._processor = processor
        self._limits = limits
        self.keys = keys
        self.gateway = gateway
        self._encoding = Counter[int]()  # prompts by key index

    def encodes(self, count: int, key: int) -> None:
        """Add `count` (or subtract, if negative) prompts of a key that are being encoded."""
        self._encoding[key] += count

    @property
    def num_requests(self) -> int:
        return self._waiting_here()[0] + self._waiting_in_gateway()[0]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._waiting_here()[1] + self._waiting_in_gateway()[1]

    def num_in_flight(self) -> int:
        """Return how many choices are running or waiting, batch lines excluded."""
        return self._num_live() + (0 if self.gateway is None else self.gateway.waiting()[2])

    def check_room(self, num_requests: int = 1, num_tokens: int = 0, key: int = 0) -> None:
        """Check that `num_requests` more of a key may wait (`has_room`). Raises `ApiError` 429."""
        waiting, tokens = map(sum, zip(self._waiting_here(), self._waiting_in_gateway(), strict=True))
        own, own_tokens = self.keys.waiting(key)
        own += self._encoding[key]
        most, most_tokens, owners = (
            self._limits.max_queued_requests,
            self._limits.max_queued_tokens,
            self.keys.num_owners,
        )
        if not has_room(most, owners, own, waiting, num_requests):
            raise queue_full(
                f"{waiting} requests are queued{_own(owners, own)}, the limit is {most} (--max-queued-requests)"
            )
        if not has_room(most_tokens, owners, own_tokens, tokens, num_tokens):
            raise queue_full(
                f"{tokens} prompt tokens are queued{_own(owners, own_tokens)}, "
                f"the limit is {most_tokens} (--max-queued-tokens)"
            )

    def _num_live(self) -> int:
        return len(self._processor.live) - self._processor.num_background

    def _waiting_here(self) -> tuple[int, int]:
        """Return the requests that wait in this process, and the tokens of prompts already encoded."""
        processor = self._processor
        num_requests = self._encoding.total() + processor.num_waiting
        return num_requests, processor.num_waiting_tokens

    def _waiting_in_gateway(self) -> tuple[int, int]:
        return (0, 0) if self.gateway is None else self.gateway.waiting()[:2]


def _own(num_owners: int, count: int) -> str:
    return f", {count} of them of this API key" if num_owners > 1 else ""
