"""A trace through several simulated engines behind the router, on one virtual time.

Each engine has a clock of its own; whichever is behind goes on next, after all that happens until then: ends of
requests that the router hears of, arrivals, and placements, which are at that moment.

Invariants: the same job gives the same result; with one engine, what `VirtualServer` gives.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from minisgl.bench.traces import TraceRequest
from minisgl.bench.virtual_run import Floats, VirtualEngine, VirtualRun, build_virtual, request_message
from minisgl.config import EngineConfig
from minisgl.engine.sim import VirtualClock
from minisgl.message import AddRequest
from minisgl.routing.api import Policy, RouterConfig
from minisgl.routing.backend import make_router

NEVER = float("inf")


class VirtualFleet:
    """`num_engines` like one another; the router remembers as many pages of each as its pool has."""

    def __init__(
        self,
        config: EngineConfig,
        num_engines: int,
        policy: Policy,
        num_requests: int,
        host_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._run = VirtualRun.of(num_requests)
        sim, clock = build_virtual(config)
        self._vocab_size = sim.info.vocab_size
        self._engines = [VirtualEngine(config, sim, clock, self._run, host_s)]
        for _ in range(num_engines - 1):
            clock = VirtualClock()
            self._engines.append(VirtualEngine(config, sim.another(clock), clock, self._run, host_s))
        size, pages = sim.info.page_size, sim.info.num_pages
        self._router = make_router(RouterConfig(policy, num_engines, page_size=size, seed=seed))
        for engine in range(num_engines):
            self._router.engine_up(engine, pages)
        self._line: dict[int, AddRequest] = {}
        self._inboxes: list[list[AddRequest]] = [[] for _ in self._engines]
        self._going: list[tuple[float, int]] = []  # a heap: engines with something to do, by their clocks
        self._ends: list[tuple[float, int]] = []  # a heap: requests that ended, and when

    def run(
        self, trace: Sequence[TraceRequest], arrivals_s: Floats, seed: int, concurrency: int | None = None
    ) -> VirtualRun:
        """As `VirtualServer.run`."""
        at, num_live = 0, 0
        if concurrency:
            arrivals_s[:] = NEVER
            arrivals_s[:concurrency] = 0.0
        while at < len(trace) or self._going or self._ends:
            arrival = float(arrivals_s[at]) if at < len(trace) else NEVER
            moment = min(arrival, self._ends[0][0] if self._ends else NEVER)
            if self._going and self._going[0][0] < moment:
                self._advance()
                continue
            num_live -= self._hear_of_ends(moment)
            if concurrency:
                arrivals_s[at : at + concurrency - num_live] = moment
            due = max(at, int(np.searchsorted(arrivals_s, moment, "right")))
            for i in range(at, due):
                self._line[i] = message = request_message(trace[i], i, self._vocab_size, seed)
                self._router.add(i, np.frombuffer(message.tokens, np.int32))
            num_live += due - at
            at = due
            self._place(moment)
        for engine in self._engines:
            engine.drain()
        return self._run.ended(trace, arrivals_s, self._engines)

    def _hear_of_ends(self, moment: float) -> int:
        count = 0
        while self._ends and self._ends[0][0] <= moment:
            _, req_id = heapq.heappop(self._ends)
            self._router.remove(req_id, int(self._run.num_tokens[req_id]))
            count += 1
        return count

    def _place(self, moment: float) -> None:
        for placed in self._router.place():
            inbox, engine = self._inboxes[placed.engine], self._engines[placed.engine]
            if not inbox and not engine.num_live:
                engine.clock.sleep_until(moment)
                heapq.heappush(self._going, (engine.clock.now(), placed.engine))
            inbox.append(self._line.pop(placed.req_id))

    def _advance(self) -> None:
        """The engine that is behind takes a step."""
        _, number = heapq.heappop(self._going)
        engine = self._engines[number]
        engine.step(self._inboxes[number])
        self._inboxes[number] = []
        if engine.num_live:
            heapq.heappush(self._going, (engine.clock.now(), number))
        else:
            engine.drain()
        now = engine.clock.now()
        for req_id in engine.ended:
            heapq.heappush(self._ends, (now, req_id))
        engine.ended.clear()
