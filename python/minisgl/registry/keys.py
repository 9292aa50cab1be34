"""The limits of each API key over all models together.

Each server reports the requests and tokens of its keys several times a second; requests that wait at the port are
counted here. A request that was sent to a server within `FRESH_S` and has no response yet counts as waiting there,
since the server may not have reported it yet.
Invariants: a request over a limit is refused before a model is loaded for it; the use of servers that have ended still
counts; waiting requests get their turn in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from minisgl.config import ApiKey
from minisgl.metrics.keys import KeyReading
from minisgl.registry.model import Model
from minisgl.registry.registry import Registry
from minisgl.server.core.api_keys import KeyUse
from minisgl.server.core.streams import STREAMS

FRESH_S = 0.25
ANSWERED = STREAMS | {
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify"),
    *("/completion", "/infill"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
}
"""Routes whose requests count against a key's `max_inflight`."""


class KeyRequest:
    """A request of an API key, from its beginning to the last byte of its response. Use `with`."""

    def __init__(self, limits: KeyLimits, number: int, model: Model, places: asyncio.Semaphore | None) -> None:
        self.model = model
        self.sent_at: float | None = None
        self._limits = limits
        self._number = number
        self._places = places
        self._has_place = False

    def __enter__(self) -> KeyRequest:
        self._limits.waiting[self._number].add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.begins()
        if self._has_place and self._places is not None:
            self._places.release()

    async def turn(self) -> None:
        """Wait until the key may have one more request in the engines. Idempotent."""
        if self._places is not None and not self._has_place:
            await self._places.acquire()
            self._has_place = True
        self.sent_at = self._limits.clock()

    def begins(self) -> None:
        """Mark that the response has begun: the request no longer waits."""
        self._limits.waiting[self._number].discard(self)


class KeyLimits:
    """The limits of all API keys of a file; index 0, callers without a key, has none."""

    def __init__(self, keys: Sequence[ApiKey], registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.waiting: list[set[KeyRequest]] = [set() for _ in range(len(keys) + 1)]
        self.use = KeyUse(keys, lambda number: (self._here(number), 0), self._there, clock)
        self._registry = registry
        self._places = {n: asyncio.Semaphore(one.max_inflight) for n, one in enumerate(keys, 1) if one.max_inflight}

    def ask(self, number: int, path: str, model: Model) -> KeyRequest:
        """Admit a request of the API key with index `number`. Raises `ApiError` 429 if it is over a limit."""
        self.use.check(number)
        return KeyRequest(self, number, model, self._places.get(number) if path in ANSWERED else None)

    def num_waiting(self, number: int) -> int:
        return self._here(number) + self._there(number)["num_waiting"]

    def _here(self, number: int) -> int:
        return sum(one.sent_at is None for one in self.waiting[number])

    def _there(self, number: int) -> KeyReading:
        since = self.clock() - FRESH_S
        fresh = Counter(
            one.model.name for one in self.waiting[number] if one.sent_at is not None and one.sent_at >= since
        )
        waiting, used = 0, self._registry.used_by_gone[number]
        for model in self._registry.models.values():
            reported, tokens = model.use_of(number)
            waiting += max(reported, fresh[model.name])
            used += tokens
        return KeyReading(num_waiting=waiting, num_waiting_tokens=0, num_requests=0, num_prompt=used, num_generated=0)
