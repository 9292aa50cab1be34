"""The reference router in Python, with which the Rust one is compared.

Invariants: a request waits or is on one engine; limits hold at every moment; no request starves, neither within a key
(priorities age) nor between keys (the key that has had least goes next).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from minisgl.routing.api import MAX_SHARE, KeyShare, Placed, RouterConfig
from minisgl.step import Int32Array

AGE = 64
"""Arrivals by which one step of priority goes earlier, as in the scheduler."""
REMEMBERED = 2
"""Pages remembered per page of an engine's cache: engines evict parts of prompts that are remembered whole, and the
rest is still worth a placement."""
BITS = 2**64 - 1


@dataclass(slots=True)
class _Request:
    req_id: int
    key: int
    prompt_len: int
    pages: list[bytes]
    queue_key: tuple[bool, int, int]  # key in its queue; requests that were placed before go first
    engine: int = -1
    placement: int = 0


@dataclass(slots=True)
class _Key:
    """Queue of an API key. `had`: work done, in token parts divided by its share. `active`: a request may go."""

    share: KeyShare
    num_inflight: int = 0
    had: int = 0
    active: bool = False
    waiting: list[_Request] = field(default_factory=list)


@dataclass(slots=True)
class _Engine:
    """State of an engine. `extra`: requests beyond its load that it reported, from other senders. `turn`: the last
    placement on it. `held`: remembered pages, least recently used first (of one use, the deepest first)."""

    up: bool = False
    load: int = 0
    extra: int = 0
    turn: int = 0
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    tree_pages: int = 0


class ReferenceRouter:
    """Router in Python: see `routing.api.Router`."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config.check()
        self._keys = [_Key(share) for share in (KeyShare(), *config.keys)]
        self._engines = [_Engine() for _ in range(config.num_engines)]
        self._requests: dict[int, _Request] = {}
        self._now = 0  # work of the last placed key before the placement: a returning key starts there
        self._num_arrivals = 0
        self._num_placements = 0
        self._next = 0  # next engine of round_robin
        self._random = config.seed

    # --------------------------------------------------------------------------------------------------- engines

    def engine_up(self, engine: int, num_pages: int | None = None) -> None:
        state = self._engine(engine)
        state.up, state.extra = True, 0
        state.held.clear()
        state.tree_pages = self._config.tree_pages if num_pages is None else REMEMBERED * num_pages

    def engine_down(self, engine: int) -> list[int]:
        state = self._engine(engine)
        state.up, state.extra = False, 0
        state.held.clear()
        lost = sorted((r for r in self._requests.values() if r.engine == engine), key=lambda r: r.placement)
        for request in lost:
            self.remove(request.req_id)
        return [request.req_id for request in lost]

    def report(self, engine: int, num_waiting: int, num_running: int) -> None:
        state = self._engine(engine)
        state.extra = max(0, num_waiting + num_running - state.load)

    def loads(self) -> list[int]:
        return [engine.load for engine in self._engines]

    def _engine(self, engine: int) -> _Engine:
        if not 0 <= engine < len(self._engines):
            raise ValueError(f"engine {engine}: must be below {len(self._engines)}")
        return self._engines[engine]

    # --------------------------------------------------------------------------------------------------- the line

    @property
    def num_waiting(self) -> int:
        return sum(len(key.waiting) for key in self._keys)

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
        if req_id in self._requests:
            raise ValueError(f"req_id {req_id}: is in use")
        if not 0 <= key < len(self._keys):
            raise ValueError(f"key {key}: must be below {len(self._keys)}")
        arrival = self._num_arrivals
        self._num_arrivals += 1
        queue_key = (not again, arrival if again else priority * AGE + arrival, arrival)
        request = _Request(req_id, key, len(tokens), self._pages(tokens, namespace), queue_key)
        self._requests[req_id] = request
        self._keys[key].waiting.append(request)
        self._refresh(key)

    def remove(self, req_id: int, num_generated: int = 0) -> None:
        if (request := self._requests.pop(req_id, None)) is None:
            return
        key = self._keys[request.key]
        self._charge(key, num_generated)
        if request.engine < 0:
            key.waiting.remove(request)
        else:
            key.num_inflight -= 1
            self._engines[request.engine].load -= 1
        self._refresh(request.key)

    def _first(self) -> _Request | None:
        """Return the request that goes next if an engine accepts it; `None` if none may go."""
        first = [(key.had, min(key.waiting, key=lambda r: r.queue_key)) for key in self._keys if key.active]
        if back := [request for _, request in first if not request.queue_key[0]]:
            return min(back, key=lambda r: r.queue_key)
        return min(first, key=lambda pair: (pair[0], pair[1].key))[1] if first else None

    def _charge(self, key: _Key, num_tokens: int) -> None:
        key.had += num_tokens * MAX_SHARE // key.share.share

    def _refresh(self, number: int) -> None:
        key = self._keys[number]
        limit = key.share.max_inflight
        active = bool(key.waiting) and (limit == 0 or key.num_inflight < limit)
        if active and not key.active:  # no credit for the time without requests
            key.had = max(key.had, self._now)
        key.active = active

    # -------------------------------------------------------------------------------------------------- placing

    def place(self) -> list[Placed]:
        placed = []
        while (one := self._place_one()) is not None:
            placed.append(one)
        return placed

    def _place_one(self) -> Placed | None:
        limit = self._config.max_inflight
        if (limit and sum(self.loads()) >= limit) or not self._taking():
            return None
        if (request := self._first()) is None:
            return None
        engine, depth = self._choose(request)
        key = self._keys[request.key]
        key.waiting.remove(request)
        key.num_inflight += 1
        if request.queue_key[0]:  # returning requests were charged before
            self._now = max(self._now, key.had)
            self._charge(key, max(1, request.prompt_len))
        self._refresh(request.key)
        self._num_placements += 1
        request.engine, request.placement = engine, self._num_placements
        self._engines[engine].turn = self._num_placements
        self._engines[engine].load += 1
        self._next = engine + 1
        return Placed(request.req_id, engine, depth * self._config.page_size)

    def _taking(self) -> list[int]:
        limit = self._config.max_inflight_per_engine
        return [i for i, state in enumerate(self._engines) if state.up and (limit == 0 or state.load < limit)]

    def _choose(self, request: _Request) -> tuple[int, int]:
        """Return an engine, and how many pages of the prompt it probably has cached."""
        taking = self._taking()
        match self._config.policy:
            case "round_robin":
                return next((engine for engine in taking if engine >= self._next), taking[0]), 0
            case "least_load":
                return self._best(taking), 0
            case "random":
                return taking[self._draw() * len(taking) >> 64], 0
            case "cache_aware":
                return self._choose_by_cache(request, taking)

    def _choose_by_cache(self, request: _Request, taking: list[int]) -> tuple[int, int]:
        config = self._config
        least = min(map(self._load, taking))
        slack = max(config.balance_requests, least * config.balance_percent // 100)
        most = max(0, request.prompt_len - 1) // config.page_size  # an engine computes at least one token
        depths = {i: self._depth(i, request.pages[:most]) for i in taking}
        num_pages = max(1, len(request.pages))
        depths = {i: found for i, found in depths.items() if self._load(i) <= least + slack * found // num_pages}
        depth = max(depths.values())
        engine = self._best(i for i, found in depths.items() if found == depth)
        self._keep(engine, request.pages)
        return engine, depth

    def _load(self, engine: int) -> int:
        return self._engines[engine].load + self._engines[engine].extra

    def _best(self, among: Iterable[int]) -> int:
        """Return the engine with the least load; then the one with the oldest placement, then the lowest id."""
        return min(among, key=lambda engine: (self._load(engine), self._engines[engine].turn, engine))

    def _draw(self) -> int:
        """Return the next 64 random bits of `splitmix64`."""
        self._random = drawn = (self._random + 0x9E3779B97F4A7C15) & BITS
        drawn = (drawn ^ (drawn >> 30)) * 0xBF58476D1CE4E5B9 & BITS
        drawn = (drawn ^ (drawn >> 27)) * 0x94D049BB133111EB & BITS
        return drawn ^ (drawn >> 31)

    # ---------------------------------------------------------------------------------------------------- prefixes

    def _pages(self, tokens: Int32Array, namespace: int) -> list[bytes]:
        """Return a digest for each full page, of all tokens up to its end, in `namespace`."""
        if self._config.policy != "cache_aware":
            return []
        size, digest, digests = self._config.page_size, str(namespace).encode(), list[bytes]()
        for end in range(size, len(tokens) + 1, size):
            digest = blake2b(digest + tokens[end - size : end].tobytes(), digest_size=16).digest()
            digests.append(digest)
        return digests

    def _depth(self, engine: int, pages: list[bytes]) -> int:
        held = self._engines[engine].held
        return next((i for i, page in enumerate(pages) if page not in held), len(pages))

    def _keep(self, engine: int, pages: list[bytes]) -> None:
        """Mark `pages` as the most recently used ones of the engine's cache, and drop the oldest beyond its limit."""
        state = self._engines[engine]
        held, pages = state.held, pages[: state.tree_pages]
        for page in pages:
            held.pop(page, None)
        while len(held) + len(pages) > state.tree_pages:
            held.popitem(last=False)
        for page in reversed(pages):
            held[page] = None
