"""API keys: which key a request has, what each key has used, and whether it may submit more.

Each key of the key file has an index, its position in the file from 1; every other key has index 0. The router enforces
shares of the engines and concurrent requests (`routing`); this module limits a key's queue and its tokens per minute.
The latter is a token bucket: full at first, refilled evenly, and drained as tokens are used, so that its level may
become negative: then the key waits.

Invariants: looking up a key takes the same time whichever key is given and whether or not it is valid; tokens of
requests that the gateway answered count.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Literal

from minisgl.config import MAX_PRIORITY, ApiKey, ServerConfig
from minisgl.metrics.keys import KeyCounts, KeyReading
from minisgl.server.core.errors import ApiError, bad_value, key_limit

DEFAULT = "default"
"""Name of the key with index 0 if there is a key file."""
MINUTE_S = 60.0
TELL_S = 0.05
QUEUED, TOKENS = "max_queued_requests", "tokens_per_minute"


class ApiKeys:
    """Lookup of API keys: from a key's bytes to its index and name."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [(i, one.key.encode()) for i, one in enumerate(config.api_keys, 1)]
        if config.api_key is not None:
            self._keys.append((0, config.api_key.encode()))
        self._names = names(config.api_keys)

    @property
    def are_required(self) -> bool:
        """True if requests must have an API key."""
        return bool(self._keys)

    def number(self, given: bytes) -> int | None:
        """Return the index of the key `given`, `None` if there is no such key. Takes the same time for every key."""
        index: int | None = None
        for number, key in self._keys:
            if hmac.compare_digest(given, key):
                index = number
        return index

    def name(self, number: int) -> str | None:
        """Return the name of the key with this index, or `None` if there is no key file."""
        return self._names[number] if self._names else None


def names(keys: Sequence[ApiKey]) -> list[str]:
    """Return the names of keys by index, `DEFAULT` first; an empty list without a key file."""
    return [DEFAULT, *(one.name for one in keys)] if keys else []


class Bucket:
    """Token bucket that limits tokens per minute. Callers pass `used`, the total so far, which never falls."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._level = float(per_minute)
        self._used = 0
        self._at = now

    def wait_s(self, used: int, now: float) -> float:
        """Update the bucket with the total `used`; return the seconds until its level is positive, 0 if it is."""
        rate = self._most / MINUTE_S
        self._level = min(self._most, self._level + (now - self._at) * rate) - (used - self._used)
        self._used, self._at = used, now
        return 0.0 if self._level > 0 else (1 - self._level) / rate


CALLER: ContextVar[int] = ContextVar("caller", default=0)
"""Index of the API key for which the current task works."""


class KeyUse:
    """Use and limits of the keys of a key file. `waiting(index)`: requests of a key that wait in this process, and
    their prompt tokens. `gateway(index)`: the gateway's counts for a key, `None` if it has none yet. `has_default`:
    whether index 0 has a key, too."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        waiting: Callable[[int], tuple[int, int]] = lambda number: (0, 0),
        gateway: Callable[[int], KeyReading | None] = lambda number: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_default: bool = False,
    ) -> None:
        self.num_owners = len(keys) + has_default
        self.counts = [KeyCounts(name) for name in names(keys)]
        self._keys = keys
        self._waiting = waiting
        self._gateway = gateway
        self._clock = clock
        self._buckets = {
            number: Bucket(one.tokens_per_minute, clock())
            for number, one in enumerate(keys, 1)
            if one.tokens_per_minute
        }

    def accepted(self, number: int, num_requests: int, num_prompt: int) -> None:
        if self.counts:
            counts = self.counts[number]
            counts.num_requests += num_requests
            counts.num_prompt += num_prompt

    def generated(self, number: int, num_tokens: int) -> None:
        if self.counts:
            self.counts[number].num_generated += num_tokens

    def readings(self) -> list[tuple[int, int]]:
        """Return each key's waiting requests and used tokens, by index, in this process and in the gateway."""
        readings = list[tuple[int, int]]()
        for number, one in enumerate(self.counts):
            readings.append((self.waiting(number)[0], one.with_(self._gateway(number)).num_tokens))
        return readings

    def waiting(self, number: int) -> tuple[int, int]:
        """Return a key's waiting requests and their prompt tokens, in this process and in the gateway."""
        (here, tokens), there = self._waiting(number), self._gateway(number) if self.counts else None
        return (here, tokens) if there is None else (here + there["num_waiting"], tokens + there["num_waiting_tokens"])

    async def tell_forever(self, tell: Callable[[list[tuple[int, int]]], None]) -> None:
        """Call `tell` with `readings()` whenever they have changed, checked every `TELL_S`. Returns when `tell` raises
        `OSError` (the reader has closed)."""
        last: list[tuple[int, int]] = []
        while True:
            if (now := self.readings()) != last:
                last = now
                try:
                    tell(now)
                except OSError:
                    return
            await asyncio.sleep(TELL_S)

    def check(self, number: int, num_requests: int = 1) -> None:
        """Check that a key may submit `num_requests` more. Raises `ApiError` 429 if its queue is full or its tokens per
        minute are used up. A request larger than the queue is allowed while nothing else of the key waits."""
        if not number:
            return
        key, there = self._keys[number - 1], self._gateway(number)
        most = key.max_queued_requests
        waiting, _ = self.waiting(number)
        if most and (waiting >= most or (waiting and waiting + num_requests > most)):
            raise self._refusal(number, QUEUED, f"{waiting} of its requests are queued, its limit is {most}")
        if (bucket := self._buckets.get(number)) is not None:
            wait_s = bucket.wait_s(self.counts[number].with_(there).num_tokens, self._clock())
            if wait_s:
                reason = f"its {key.tokens_per_minute} tokens per minute are used up"
                raise self._refusal(number, TOKENS, reason, math.ceil(wait_s))

    def check_may(self, number: int, what: Literal["lora", "cache", "models"], path: str) -> None:
        """Check that a key's entry in the key file allows the route `path`. Raises `ApiError` 403."""
        if number and not getattr(self._keys[number - 1], what):
            reason = f"API key {self._keys[number - 1].name}: needs `{what}: true` in its entry of the key file"
            raise ApiError(403, f"{path}: {reason}", code="not_allowed")

    def check_priority(self, number: int, priority: int) -> None:
        """Check that a key may use `priority`. Raises `ApiError` 400."""
        most = self._keys[number - 1].max_priority if number else MAX_PRIORITY
        if abs(priority) > most:
            raise bad_value("priority", priority, f"must be from {-most} to {most}")

    def _refusal(self, number: int, limit: str, reason: str, retry_after_s: int = 1) -> ApiError:
        refused = self.counts[number].refused
        refused[limit] = refused.get(limit, 0) + 1
        return key_limit(f"API key {self._keys[number - 1].name}: {reason} ({limit})", retry_after_s)
