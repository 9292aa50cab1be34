"""The router's interface: the protocol that the reference and the Rust implementation share.

Invariants: integers only, no clock; equal calls give equal placements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from minisgl.step import Int32Array

Policy = Literal["round_robin", "least_load", "random", "cache_aware"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MAX_SHARE = 2**20
"""Largest share of a key: a charge divided by it is still above 0."""


@dataclass(frozen=True, slots=True)
class KeyShare:
    """An API key's share of the engines among waiting keys, and its limit of running requests (0: none)."""

    share: int = 1
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Router configuration. `tree_pages`: pages of `page_size` tokens that the router remembers of each engine's prefix
    cache. A limit of 0 means none. `cache_aware` only: an engine that has the whole prompt cached may have a load of
    `balance_requests`, or `balance_percent` of the least load if that is more, above the least load; with a part of the
    prompt cached, that part of it. `keys[k - 1]` is for request key k; key 0 has share 1 and no limits."""

    policy: Policy
    num_engines: int
    page_size: int = 16
    tree_pages: int = 65_536
    max_inflight: int = 0
    max_inflight_per_engine: int = 0
    balance_requests: int = 8
    balance_percent: int = 50
    seed: int = 0  # seed of `random`
    keys: tuple[KeyShare, ...] = ()

    def check(self) -> RouterConfig:
        """Return self, or raise `ValueError` for an invalid field."""
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
        for name in ("num_engines", "page_size", "tree_pages"):
            if not 1 <= getattr(self, name) < 2**32:
                raise ValueError(f"{name} {getattr(self, name)}: must be between 1 and 2^32 - 1")
        for name in ("balance_requests", "balance_percent", "max_inflight", "max_inflight_per_engine"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ValueError(f"{name} {getattr(self, name)}: must be between 0 and 2^32 - 1")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed {self.seed}: must be between 0 and 2^64 - 1")
        for at, key in enumerate(self.keys):
            if not 1 <= key.share <= MAX_SHARE:
                raise ValueError(f"keys[{at}].share {key.share}: must be between 1 and {MAX_SHARE}")
            if not 0 <= key.max_inflight < 2**32:
                raise ValueError(f"keys[{at}].max_inflight {key.max_inflight}: must be between 0 and 2^32 - 1")
        return self


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement of request `req_id` on `engine`, which probably has `matched_len` of its tokens cached."""

    req_id: int
    engine: int
    matched_len: int


class Router(Protocol):
    """Router: queues requests until `place` assigns them to engines, and counts them there until `remove`."""

    def engine_up(self, engine: int, num_pages: int | None = None) -> None:
        """Let an engine accept requests, with an empty cache of `num_pages` pages, of which the router remembers twice
        as many (`None`: `tree_pages`). At first no engine accepts any."""

    def engine_down(self, engine: int) -> list[int]:
        """Stop using an engine. Returns the requests that it has lost, in order of placement. They are no longer known:
        `add` those that must continue."""

    def report(self, engine: int, num_waiting: int, num_running: int) -> None:
        """Record the load that an engine reported."""

    def add(
        self,
        req_id: int,
        tokens: Int32Array,
        priority: int = 0,
        key: int = 0,
        *,
        again: bool = False,
        namespace: int = 0,
    ) -> None:
        """Queue a request by priority; with `again`, before all that are not. Its cached prefix counts in `namespace`
        only. Raises `ValueError` for an id in use or an unknown key; the other methods do for an unknown engine."""

    def place(self) -> list[Placed]:
        """Place as many waiting requests as limits allow, and return them in order."""

    def remove(self, req_id: int, num_generated: int = 0) -> None:
        """Remove a request that ended or was aborted, if known. `num_generated` is charged to its key's share."""

    def loads(self) -> list[int]:
        """Return the number of placed and not removed requests, by engine."""

    @property
    def num_waiting(self) -> int: ...
