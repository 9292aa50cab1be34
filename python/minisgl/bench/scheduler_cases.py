"""The cases of `minisgl bench scheduler`: each brings a scheduler into a steady state, then times its steps.

Invariants: the load is asserted, not assumed (rows, pages given out, a full pool), so that a faster figure cannot come
from less work.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import numpy as np

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.step import Abort, Arrival, Event, Events, StepPlan

Make = Callable[[ControlPlaneConfig], ControlPlane]
Case = Callable[[Make, int], list[float]]
POLICIES: tuple[SchedulePolicy, ...] = get_args(SchedulePolicy)
NEVER = 1 << 20
TOKEN = 7  # the token that every row samples; not a stop id
EOS = 2
SMALLEST_POOL = 124_000  # pages; the warm-up of `churn` fills them
SMALLEST = ControlPlaneConfig(num_pages=1, page_size=1, max_running_requests=1, max_prefill_length=1, context_len=2)


def measured(run: Callable[[], list[float]]) -> dict[str, float]:
    """Return median, minimum and upper percentiles of the times from `run`, with the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        times = sorted(run())
    finally:
        gc.enable()
    return {
        "median": round(statistics.median(times), 3),
        "min": round(times[0], 3),
        **{f"p{share}": round(times[len(times) * share // 100], 3) for share in (90, 95, 99)},
    }


ROUNDS = 5


def in_rounds(runs: Sequence[Callable[[], list[float]]], rounds: int = ROUNDS) -> list[dict[str, float]]:
    """Return the figures of `measured` for each run: the median over `rounds` rounds through all runs. `low` and `high`
    are the extremes of the rounds' medians.

    A run takes a few milliseconds, so that a disturbance of the machine affects all of it. Spread over rounds, it has
    no effect unless it hits half of them.
    """
    by_round = [[measured(run) for run in runs] for _ in range(rounds)]
    return [over_rounds(figures) for figures in zip(*by_round, strict=True)]


def over_rounds(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    middle = {key: round(statistics.median(figures[key] for figures in rounds), 3) for key in rounds[0]}
    medians = [figures["median"] for figures in rounds]
    return middle | {"low": min(medians), "high": max(medians)}


class Loop:
    """A driver of steps without overlap. `times_us` holds schedule + commit of the timed steps."""

    def __init__(self, make: Make, config: ControlPlaneConfig) -> None:
        self.plane = make(config)
        self.step = 0
        self.next_id = 0
        self.times_us: list[float] = []
        self.tokens = np.full(config.max_running_requests, TOKEN, np.int32)
        self.empty = Events()

    def arrival(self, num_tokens: int, max_tokens: int = NEVER) -> Arrival:
        """Return a new request whose prompt shares no page with others: its first token depends on its id."""
        tokens = np.full(num_tokens, 3, np.int32)
        tokens[0] = 1000 + self.next_id
        self.next_id += 1
        return Arrival(self.next_id - 1, tokens, num_tokens, max_tokens)

    def run(self, events: list[Event] | None = None) -> StepPlan:
        """Run one step that is not timed."""
        plan = self.plane.schedule(self.step, self.empty if events is None else Events(events))
        self.plane.commit(self.step, self.tokens[: plan.num_rows])
        self.step += 1
        return plan

    def timed(self, events: Events, num_rows: int) -> StepPlan:
        """Run one timed step of `num_rows` rows."""
        plane, step, tokens = self.plane, self.step, self.tokens[:num_rows]
        start = time.perf_counter_ns()
        plan = plane.schedule(step, events)
        plane.commit(step, tokens)
        self.times_us.append((time.perf_counter_ns() - start) / 1000)
        self.step += 1
        return plan


def decode(batch: int, context: int = 512, page_size: int = 1, interval: int = 0) -> Case:
    """Return a case in which `batch` rows decode after `context` tokens; with page size 1 every row gets a page in
    every step. With an `interval` the model has states, and rows are at different positions between two snapshots."""

    def case(make: Make, repeats: int) -> list[float]:
        warm = 50
        spread = interval or 1
        length = context + spread + warm + repeats + 2
        pages = batch * 2 * -(-length // page_size)
        config = ControlPlaneConfig(pages, page_size, batch, batch * (context + spread), 2 * length, (EOS,))
        if interval:
            slots = batch * (length // interval + 1)
            config = dataclasses.replace(config, checkpoint_interval=interval, num_checkpoints=slots)
        loop = Loop(make, config)
        loop.run([loop.arrival(context + i % spread, length - context - spread) for i in range(batch)])
        for _ in range(warm):
            loop.run()
        saved = loop.plane.stats().num_saved_total
        for _ in range(repeats):
            plan = loop.timed(loop.empty, batch)
            assert plan.num_decode_rows == plan.num_rows == batch
            assert page_size > 1 or plan.num_page_ids == batch
        saved = loop.plane.stats().num_saved_total - saved
        assert not interval or saved >= repeats * batch // interval - batch, "each row saves its state as it goes on"
        return loop.times_us

    return case


def churn(pages: int) -> Case:
    """Return a case of 256 rows with a full pool: in every step a request ends and one of 200 tokens arrives."""

    def case(make: Make, repeats: int) -> list[float]:
        batch, life = 256, 256
        config = ControlPlaneConfig(pages, 1, batch, 8192, 1024, (EOS,))
        loop = Loop(make, config)
        for _ in range((pages - SMALLEST_POOL) // 8000):
            loop.run([loop.arrival(200, 1) for _ in range(40)])
        for _ in range(batch):  # one a step: from here on one ends a step
            loop.run([loop.arrival(200, life)])
        for _ in range(200):
            loop.run([loop.arrival(200, life)])
        for _ in range(repeats):
            plan = loop.timed(Events([loop.arrival(200, life)]), batch)
            assert (plan.num_rows, plan.num_decode_rows, plan.num_assigned, plan.num_freed) == (batch, batch - 1, 1, 1)
            assert plan.num_free_pages == 0 and plan.num_retracted == 0, "the pool is not full"
        return loop.times_us

    return case


def decode_256_evict_16(leaves: int) -> Case:
    """Return a case of 256 rows with page size 16, of which 16 need a page in each step, all by eviction from a prefix
    tree with `leaves` leaves of one page."""

    def case(make: Make, repeats: int) -> list[float]:
        batch, size = 256, 16
        pages = leaves + batch * (528 // size + 1)
        config = ControlPlaneConfig(pages, size, batch, batch * 544, 16_384, (EOS,))
        loop = Loop(make, config)
        for _ in range(leaves // batch):
            loop.run([loop.arrival(size + 1, 1) for _ in range(batch)])
        assert loop.plane.stats().num_evictable_pages == leaves
        loop.run([loop.arrival(512 + i % size, repeats + 64) for i in range(batch)])
        while loop.run().num_free_pages:
            pass
        left = loop.run().num_evictable_pages
        for _ in range(repeats):
            plan = loop.timed(loop.empty, batch)
            assert plan.num_decode_rows == batch and plan.num_page_ids == 16
            assert plan.num_evictable_pages == left - 16, "16 pages are to be evicted"
            left -= 16
        return loop.times_us

    return case


def prefill_16x512(make: Make, repeats: int) -> list[float]:
    """Time 16 new requests of 512 tokens, all computed; their end is not timed."""
    num, length = 16, 512
    config = ControlPlaneConfig((repeats + 5) * num * (length + 8), 1, num, num * length, 1024, (EOS,))
    loop = Loop(make, config)
    for at in range(repeats + 3):
        if at == 3:
            loop.times_us.clear()
        arrivals = [loop.arrival(length, 4) for _ in range(num)]
        plan = loop.timed(Events(list(arrivals)), num)
        assert (plan.num_rows, plan.num_tokens) == (num, num * length)
        loop.run([Abort(arrival.req_id) for arrival in arrivals])
    return loop.times_us


def line(policy: SchedulePolicy) -> Case:
    """Return a case of 64 rows: in every step one request ends by its length, one of 80 waiting ones starts, and one
    arrives. Their prompts of 200 tokens begin with one of eight prefixes of 128."""

    def case(make: Make, repeats: int) -> list[float]:
        batch, life, size = 64, 64, 16
        config = ControlPlaneConfig(4096, size, batch, 8192, 1024, (EOS,), schedule_policy=policy)
        loop = Loop(make, config)

        def arrival() -> Arrival:
            made = loop.arrival(200, life)
            made.tokens[128] = made.tokens[0]
            made.tokens[0] = loop.next_id * 7919 % 8
            return made

        for _ in range(batch):  # one a step: from here on one ends a step
            loop.run([arrival()])
        loop.run([arrival() for _ in range(81)])
        for _ in range(200):
            loop.run([arrival()])
        for _ in range(repeats):
            plan = loop.timed(Events([arrival()]), batch)
            assert (plan.num_rows, plan.num_assigned) == (batch, 1) and plan.num_retracted == 0
        assert loop.plane.stats().num_waiting == 80
        return loop.times_us

    return case


def blocked_line(policy: SchedulePolicy) -> Case:
    """Return a case of 8 decode rows and 64 requests that wait for memory; 8,192 tokens of each are cached."""

    def case(make: Make, repeats: int) -> list[float]:
        batch, size, cached, length = 8, 16, 8192, 42_000
        config = ControlPlaneConfig(2640, size, 2 * batch, cached + size, length + size, (EOS,), schedule_policy=policy)
        loop = Loop(make, config)
        text = np.full(cached, 5, np.int32)
        for _ in range(batch):
            running = loop.arrival(cached + size, repeats + 300)
            running.tokens[:cached], running.tokens[cached] = text, running.tokens[0]
            loop.run([running])
        waiting: list[Event] = []
        for _ in range(64):
            waiter = loop.arrival(length, 64)
            waiter.tokens[:cached], waiter.tokens[cached] = text, waiter.tokens[0]
            waiting.append(waiter)
        loop.run(waiting)
        for _ in range(repeats):
            assert loop.timed(loop.empty, batch).num_assigned == 0
        assert loop.plane.stats().num_waiting == 64
        return loop.times_us

    return case


class Spec(NamedTuple):
    """A case with its number of timed steps and its bars in us, both by scheduler."""

    case: Case
    repeats: dict[str, int]
    bars: dict[str, float]

    def repeats_of(self, backend: str) -> int:
        """Return the number of timed steps for a scheduler. Parts in Rust do not make the Python one faster."""
        return self.repeats.get(backend, self.repeats["python"])


def spec(case: Case, rust: tuple[int, float], python: int, python_bar: float | None = None) -> Spec:
    bars = {"rust_hotpath": rust[1]} | ({} if python_bar is None else {"python": python_bar})
    return Spec(case, {"rust_hotpath": rust[0], "python": python}, bars)


CASES: dict[str, Spec] = {
    "decode_1": spec(decode(1), (4000, 1.0), 1000),
    "decode_32": spec(decode(32), (2000, 1.5), 400),
    "decode_256": spec(decode(256), (1000, 4.0), 200, 1500.0),
    "decode_256_states": spec(decode(256, interval=256), (1000, 4.2), 200),
    "decode_512": spec(decode(512), (600, 8.0), 100),
    "churn_256": spec(churn(SMALLEST_POOL), (2000, 10.0), 200),
    "decode_256_evict_16": spec(decode_256_evict_16(65_536), (2000, 10.0), 200),
    "prefill_16x512": spec(prefill_16x512, (100, 50.0), 20),
    **{f"line_{policy}": Spec(line(policy), {"rust_hotpath": 2000, "python": 100}, {}) for policy in POLICIES},
    **{
        f"blocked_{policy}": Spec(blocked_line(policy), {"rust_hotpath": 1000, "python": 50}, {}) for policy in POLICIES
    },
}
