"""The front end's view of each engine of a pool, and of all together.

Invariants: counters continue when an engine is restarted, because the sum keeps the counts of its dead processes; an
engine that does not serve has no requests and no pages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from minisgl.message import EngineStats, MeterReading, PrefixState

READY = "ready"
NUMBERS = frozenset(name for name, kind in EngineStats.__annotations__.items() if kind in ("int", "float"))
KEPT = frozenset(name for name in NUMBERS if name.endswith("_total")) | {"cpu_s"}  # kept after a death


@dataclass(slots=True)
class EngineView:
    """An engine's `state` (`EngineState`), `since` when (`time.monotonic`), and how often it became ready again."""

    engine: int
    since: float
    state: str = "starting"
    reason: str = ""
    restarts: int = 0
    was_ready: bool = False
    last: EngineStats | None = None  # statistics of the current process
    before: EngineStats | None = None  # sum of its earlier processes

    @property
    def stats(self) -> EngineStats | None:
        return together([one for one in (self.before, self.last) if one is not None])

    def change(self, state: str, reason: str, now: float) -> None:
        if state == self.state:
            self.reason = reason
            return
        if state == READY:
            self.restarts += self.was_ready
            self.was_ready = True
        elif self.last is not None:
            self.before, self.last = together([one for one in (self.before, counted(self.last)) if one]), None
        self.state, self.reason, self.since = state, reason, now

    def told(self, now: float) -> dict[str, Any]:
        """Return the state as JSON fields, for /stats and /health."""
        return {
            "engine": self.engine,
            "state": self.state,
            "reason": self.reason or None,
            "restarts": self.restarts,
            "since_s": round(now - self.since, 3),
        }


class EngineViews:
    """The views of all engines. `num_engines` is the size of the pool, or None for a single engine without a pool."""

    def __init__(self, num_engines: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._has_pool = num_engines is not None
        self._clock = clock
        self.all = [EngineView(engine, clock()) for engine in range(num_engines or 1)]

    def change(self, engine: int, state: str, reason: str = "") -> None:
        self.all[engine].change(state, reason, self._clock())

    def say(self, engine: int, stats: EngineStats) -> None:
        self.all[engine].last = stats

    def ready(self) -> None:
        """Mark the only engine as ready. With a pool it does nothing, since the pool reports each engine's state."""
        if not self._has_pool:
            self.change(0, READY)

    def failed(self, reason: str) -> None:
        """Mark the only engine as dead. With a pool it does nothing, since the pool reports each engine's state."""
        if not self._has_pool:
            self.all[0].state, self.all[0].reason, self.all[0].since = "dead", reason, self._clock()

    def together(self) -> EngineStats | None:
        if not self._has_pool:
            return self.all[0].last
        return together([stats for view in self.all if (stats := view.stats) is not None])


def counted(stats: EngineStats) -> EngineStats:
    """Return the statistics that remain true of an engine that has ended: its counters, without gauges."""
    gone: dict[str, Any] = dict.fromkeys(NUMBERS - KEPT, 0)
    meters = {name: msgspec.structs.replace(one, recent_s=0.0) for name, one in stats.meters.items()}
    return msgspec.structs.replace(stats, **gone, meters=meters, ranks=(), prefixes=())


def together(stats: Sequence[EngineStats]) -> EngineStats | None:
    """Return the engines' statistics added up, without those of ranks; None if there are none."""
    if len(stats) < 2:
        return stats[0] if stats else None
    numbers = {name: sum(getattr(one, name) for one in stats) for name in NUMBERS}
    return msgspec.structs.replace(
        stats[0],
        **numbers | {"store_bytes": max(one.store_bytes for one in stats)},  # engines of a server share a folder
        cpu_backend="/".join(dict.fromkeys(one.cpu_backend for one in stats if one.cpu_backend)),
        failovers=tuple(failover for one in stats for failover in one.failovers),
        failover_reason=next((one.failover_reason for one in stats if one.failover_reason), ""),
        meters=_meters(one.meters for one in stats),
        ranks=(),
        prefixes=_prefixes(one.prefixes for one in stats),
    )


def _meters(all_: Iterable[Mapping[str, MeterReading]]) -> dict[str, MeterReading]:
    total: dict[str, MeterReading] = {}
    for meters in all_:
        for name, reading in meters.items():
            total[name] = added(total[name], reading) if name in total else reading
    return total


def added(first: MeterReading, second: MeterReading) -> MeterReading:
    return MeterReading(
        first.count + second.count,
        first.total_s + second.total_s,
        max(first.longest_s, second.longest_s),
        max(first.recent_s, second.recent_s),
        dict(Counter(first.spread) + Counter(second.spread)),
    )


def _prefixes(all_: Iterable[Sequence[PrefixState]]) -> tuple[PrefixState, ...]:
    """Merge the prefixes of all engines: hits are summed; ready or pinned means in every engine that has it."""
    by_id: dict[int, list[PrefixState]] = {}
    for states in all_:
        for state in states:
            by_id.setdefault(state.prefix_id, []).append(state)
    return tuple(reduce(_same, states) for states in by_id.values())


def _same(first: PrefixState, second: PrefixState) -> PrefixState:
    return msgspec.structs.replace(
        first,
        is_ready=first.is_ready and second.is_ready,
        is_pinned=first.is_pinned and second.is_pinned,
        num_hits=first.num_hits + second.num_hits,
    )
