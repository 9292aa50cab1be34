"""Callers by their API keys: who asks, what each has used, and whether it may ask for more.

A key of the file has a number, its place there from 1; all others are number 0. Shares of the engines and requests at
once are kept where requests are dealt out (`routing`); here a key's queue is bounded, and its tokens per minute. Those
are a bucket: full at first, filled evenly, and what a request uses is taken out as it comes, so that it may be below
nothing: then the key waits.

Invariants: which key was given, and whether one was right, takes the same time to find; what the gateway used counts.
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
"""Name of number 0 where there is a file."""
MINUTE_S = 60.0
TELL_S = 0.05
QUEUED, TOKENS = "max_queued_requests", "tokens_per_minute"


class ApiKeys:
    """Whose a key is."""

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [(i, one.key.encode()) for i, one in enumerate(config.api_keys, 1)]
        if config.api_key is not None:
            self._keys.append((0, config.api_key.encode()))
        self._names = names(config.api_keys)

    @property
    def are_asked(self) -> bool:
        """Whether a request must show a key."""
        return bool(self._keys)

    def number(self, given: bytes) -> int | None:
        """The number of the key; None: there is no such key. All are compared, whichever it is."""
        found: int | None = None
        for number, key in self._keys:
            if hmac.compare_digest(given, key):
                found = number
        return found

    def name(self, number: int) -> str | None:
        """None: there is no file, and nobody to tell apart."""
        return self._names[number] if self._names else None


def names(keys: Sequence[ApiKey]) -> list[str]:
    """By number; none without a file."""
    return [DEFAULT, *(one.name for one in keys)] if keys else []


class Bucket:
    """So many tokens a minute. `used` is a total that only grows."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._most = float(per_minute)
        self._level = float(per_minute)
        self._used = 0
        self._at = now

    def wait_s(self, used: int, now: float) -> float:
        """How long until there is some again; 0: there is."""
        rate = self._most / MINUTE_S
        self._level = min(self._most, self._level + (now - self._at) * rate) - (used - self._used)
        self._used, self._at = used, now
        return 0.0 if self._level > 0 else (1 - self._level) / rate


CALLER: ContextVar[int] = ContextVar("caller", default=0)
"""The number of the key for which a task works."""


class KeyUse:
    """What the keys of a file use. `waiting`: requests of a key that wait here, and the tokens of their prompts.
    `gateway`: its reading of a number; None: it does not know of keys yet. `has_default`: whether number 0 has a key,
    too."""

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
            found = self.counts[number]
            found.num_requests += num_requests
            found.num_prompt += num_prompt

    def generated(self, number: int, num_tokens: int) -> None:
        if self.counts:
            self.counts[number].num_generated += num_tokens

    def readings(self) -> list[tuple[int, int]]:
        """By number: requests that wait, and tokens that were used, on both sides."""
        found = list[tuple[int, int]]()
        for number, one in enumerate(self.counts):
            found.append((self.waiting(number)[0], one.with_(self._gateway(number)).num_tokens))
        return found

    def waiting(self, number: int) -> tuple[int, int]:
        """Return the requests of a key that wait, on both sides, and the tokens of their prompts."""
        (here, tokens), there = self._waiting(number), self._gateway(number) if self.counts else None
        return (here, tokens) if there is None else (here + there["num_waiting"], tokens + there["num_waiting_tokens"])

    async def tell_forever(self, tell: Callable[[list[tuple[int, int]]], None]) -> None:
        """What has changed; `tell` may raise `OSError` when nobody listens any more."""
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
        """Raise `ApiError` 429 unless the key may have as many more. What is larger than its queue may wait alone."""
        if not number:
            return
        key, there = self._keys[number - 1], self._gateway(number)
        most = key.max_queued_requests
        waiting, _ = self.waiting(number)
        if most and (waiting >= most or (waiting and waiting + num_requests > most)):
            raise self._refusal(number, QUEUED, f"{waiting} requests of it wait already, its limit is {most}")
        if (bucket := self._buckets.get(number)) is not None:
            wait_s = bucket.wait_s(self.counts[number].with_(there).num_tokens, self._clock())
            if wait_s:
                reason = f"it has used its {key.tokens_per_minute} tokens per minute"
                raise self._refusal(number, TOKENS, reason, math.ceil(wait_s))

    def check_may(self, number: int, what: Literal["lora", "cache", "models"], path: str) -> None:
        """Raise `ApiError` 403 for a route that an entry of the key file must allow."""
        if number and not getattr(self._keys[number - 1], what):
            reason = f"API key {self._keys[number - 1].name}: not without `{what}: true` in its entry of the key file"
            raise ApiError(403, f"{path}: {reason}", code="not_allowed")

    def check_priority(self, number: int, priority: int) -> None:
        """Raise `ApiError` 400 for one that the key may not ask for."""
        most = self._keys[number - 1].max_priority if number else MAX_PRIORITY
        if abs(priority) > most:
            raise bad_value("priority", priority, f"must be from {-most} to {most}")

    def _refusal(self, number: int, limit: str, reason: str, retry_after_s: int = 1) -> ApiError:
        refused = self.counts[number].refused
        refused[limit] = refused.get(limit, 0) + 1
        return key_limit(f"API key {self._keys[number - 1].name}: {reason} ({limit})", retry_after_s)
