"""What a router is: the Protocol that the reference and the Rust implementation share.

Invariants: integers only, no clock; the same calls give the same placements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from minisgl.step import Int32Array

Policy = Literal["round_robin", "least_load", "random", "cache_aware"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MAX_SHARE = 2**20
"""The largest share of a key: a charge divided by it is above 0."""


@dataclass(frozen=True, slots=True)
class KeyShare:
    """What an API key gets of the engines beside others that wait, and how many requests at once (0: any)."""

    share: int = 1
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`tree_pages` of `page_size` tokens are what the router remembers of an engine's prefix cache. Limits: 0 is none.
    Of `cache_aware`: an engine that matches the whole prompt may have `balance_requests`, or `balance_percent` of the
    least load if that is more, above the least load; one that matches a part of the prompt that part of it.
    `keys`: request key k is `keys[k - 1]`; key 0, without limits and with share 1, are all others."""

    policy: Policy
    num_engines: int
    page_size: int = 16
    tree_pages: int = 65_536
    max_inflight: int = 0
    max_inflight_per_engine: int = 0
    balance_requests: int = 8
    balance_percent: int = 50
    seed: int = 0  # of `random`
    keys: tuple[KeyShare, ...] = ()

    def check(self) -> RouterConfig:
        """Raise `ValueError` for what cannot be, else return self."""
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
    """Request `req_id` goes to `engine`, of whose cache it is thought to match `matched_len` tokens."""

    req_id: int
    engine: int
    matched_len: int


class Router(Protocol):
    """Requests stand in line until `place` gives them to an engine, and count there until `remove`."""

    def engine_up(self, engine: int, num_pages: int | None = None) -> None:
        """It takes requests from now on, with an empty cache of so many pages, of which twice as many are remembered
        (None: `tree_pages` are). No engine does at first."""

    def engine_down(self, engine: int) -> list[int]:
        """It takes none, and has lost these, in the order in which they were placed. They are forgotten: `add` those
        again that are to go on."""

    def report(self, engine: int, num_waiting: int, num_running: int) -> None:
        """What the engine itself said last of its load."""

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
        """At its place in the line; with `again` before all that are not. Its prefix counts in `namespace` alone.
        Raises `ValueError` for an id in use, and for a key that is not there, as the others do for an engine."""

    def place(self) -> list[Placed]:
        """Whoever may go now, in order."""

    def remove(self, req_id: int, num_generated: int = 0) -> None:
        """It ended, or nobody waits for it any more. `num_generated`: for the shares of keys. No-op if unknown."""

    def loads(self) -> list[int]:
        """By engine: requests that were placed there and not removed."""

    @property
    def num_waiting(self) -> int: ...
