"""Prefixes that a front end keeps in the caches of its engines, with the engines' reports.

Invariants: every engine gets the same orders; ids are never reused; no call waits forever for a lost engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from minisgl.message import AddPrefix, CacheCleared, ClearCache, EngineStats, PrefixChanged, RemovePrefix, ToEngine
from minisgl.step import Int32Array

WARMING, READY, REFUSED, FAILED, REMOVED, UNKNOWN = "warming", "ready", "refused", "failed", "removed", "unknown"


@dataclass(slots=True, eq=False)
class Prefix:
    """A prefix in the engines' caches. `said` has each engine's last report about it."""

    prefix_id: int
    num_tokens: int
    pin: bool
    said: dict[int, PrefixChanged] = field(default_factory=dict)

    @property
    def refusal(self) -> PrefixChanged | None:
        return next((report for report in self.said.values() if report.state in (REFUSED, FAILED)), None)

    def state(self, engine: int) -> str:
        return self.said[engine].state if engine in self.said else WARMING


@dataclass(slots=True, eq=False)
class Clearing:
    """A cache-clearing order. `num_pages` has the freed pages of each engine that has answered."""

    num_pages: dict[int, int] = field(default_factory=dict)


class PrefixBook:
    """The prefixes of a front end. `serving` returns the last statistics of each serving engine, by engine id."""

    def __init__(
        self, post: Callable[[ToEngine], None], serving: Callable[[], Mapping[int, EngineStats | None]]
    ) -> None:
        self._post = post
        self._serving = serving
        self._next_id = 1
        self._removed: dict[int, Prefix] = {}  # removed, but not by every engine yet
        self._clearings: list[Clearing] = []  # not answered by every engine
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0
        self.prefixes: dict[int, Prefix] = {}

    # --------------------------------------------------------------------------------------------------------- orders

    def insert(self, tokens: Int32Array, *, pin: bool) -> Prefix:
        """Have every engine compute and keep a prefix."""
        prefix = Prefix(self._next_id, len(tokens), pin)
        self._next_id += 1
        self.prefixes[prefix.prefix_id] = prefix
        self._post(AddPrefix(prefix.prefix_id, tokens.tobytes(), pin))
        return prefix

    def remove(self, prefix: Prefix) -> None:
        """Remove a prefix from all engines. Idempotent."""
        if self.prefixes.pop(prefix.prefix_id, None) is not None:
            self._removed[prefix.prefix_id] = prefix
            self._post(RemovePrefix(prefix.prefix_id))

    def clear(self) -> Clearing:
        clearing = Clearing()
        self._clearings.append(clearing)
        self._post(ClearCache())
        return clearing

    # --------------------------------------------------------------------------------------------------------- states

    def is_answered(self, prefix: Prefix) -> bool:
        """Return whether every engine has accepted or refused the prefix, or one has refused it."""
        return prefix.refusal is not None or self._all(lambda engine: engine in prefix.said)

    def is_settled(self, prefix: Prefix) -> bool:
        """Return whether the prefix is ready on every engine, or one has refused it."""
        return prefix.refusal is not None or self._all(lambda engine: prefix.state(engine) == READY)

    def _all(self, condition: Callable[[int], bool]) -> bool:
        """Return whether `condition` holds for every serving engine; False if there is none yet."""
        serving = self._serving()
        return bool(serving) and all(map(condition, serving))

    def is_removed(self, prefix: Prefix) -> bool:
        return all(prefix.state(engine) in (REMOVED, UNKNOWN, REFUSED, FAILED) for engine in self._serving())

    def is_cleared(self, clearing: Clearing) -> bool:
        return all(engine in clearing.num_pages for engine in self._serving())

    def num_hits(self, prefix: Prefix) -> dict[int, int]:
        """Return the known number of hits of a prefix, by engine id."""
        return {
            engine: next((state.num_hits for state in stats.prefixes if state.prefix_id == prefix.prefix_id), 0)
            for engine, stats in self._serving().items()
            if stats is not None
        }

    # ------------------------------------------------------------------------------------------------ what engines say

    def take(self, engine: int, message: PrefixChanged | CacheCleared) -> None:
        if isinstance(message, CacheCleared):
            for clearing in self._clearings:
                if engine not in clearing.num_pages:
                    clearing.num_pages[engine] = message.num_pages
                    break
        elif (prefix := self.prefixes.get(message.prefix_id, self._removed.get(message.prefix_id))) is not None:
            prefix.said[engine] = message
        self.tell()

    def lost(self, engine: int) -> None:
        """Forget the reports of a lost engine, so that nothing waits for it. On return it gets the orders again."""
        for prefix in (*self.prefixes.values(), *self._removed.values()):
            prefix.said.pop(engine, None)
        for clearing in self._clearings:
            clearing.num_pages.setdefault(engine, 0)
        self.tell()

    def tell(self) -> None:
        """Drop orders that every serving engine has answered, and call the listeners. Called after each change."""
        self._clearings = [one for one in self._clearings if not self.is_cleared(one)]
        self._removed = {number: one for number, one in self._removed.items() if not self.is_removed(one)}
        for listener in tuple(self._listeners.values()):
            listener()

    @contextlib.contextmanager
    def listening(self, changed: Callable[[], None]) -> Iterator[None]:
        """Have `changed()` called after each change, while in the `with` block."""
        number = self._next_listener
        self._next_listener += 1
        self._listeners[number] = changed
        try:
            yield
        finally:
            del self._listeners[number]
