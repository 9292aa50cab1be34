"""Whether anybody starves: the Rust scheduler under random load that never lets up, for as many steps as one likes.

    python -m benchmark.starving --steps 10000000 --out FILE     # a quarter of an hour for each policy

Prompts of every length, some of families that the cache knows, of three priorities; pages are scarce, rows are
retracted, forwards fail. Of each priority the one that waits longest is looked at in every step: how many later ones of
its own have started before it. Nobody behind it was overtaken more often: who overtakes both overtook it, too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.bench.environment import environment
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.scheduler.reference.ranking import WINDOWS
from minisgl.step import Arrival, Event, Events, ForwardFailed

PRIORITIES = 3
MOST_WAITING = 2000
PAGE, PAGES, ROWS = 4, 48, 4


class Load:
    """Arrivals without an end: a few in a step, now and then hundreds."""

    def __init__(self, seed: int, policy: SchedulePolicy) -> None:
        self._draw = random.Random(seed)
        draw = self._draw
        self._families = [[draw.randrange(9) for _ in range(draw.randrange(8, 60))] for _ in range(6)]
        self._of_family = 0.95 if policy == "lpm" else 0.3
        self._next_id = 0

    def arrivals(self, num_waiting: int) -> list[Arrival]:
        draw = self._draw
        if num_waiting > MOST_WAITING:
            return []
        count = 1500 if draw.random() < 2e-4 else draw.choice((0, 0, 1, 2))
        return [self._one() for _ in range(count)]

    def _one(self) -> Arrival:
        draw = self._draw
        own = 1 if draw.random() < 0.9 else draw.randrange(2, 60)
        family = draw.choice(self._families) if draw.random() < self._of_family else []
        prompt = np.array([*family, *(draw.randrange(9) for _ in range(own))], np.int32)
        self._next_id += 1
        return Arrival(
            self._next_id - 1,
            prompt,
            len(prompt),
            draw.choice((1, 2, 9)),
            priority=draw.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 2)),
        )


class Watch:
    """By priority: who came, in order, and how many have started."""

    def __init__(self) -> None:
        self.came: list[deque[int]] = [deque() for _ in range(PRIORITIES)]  # those that wait, and some that do not
        self.num_gone = [0] * PRIORITIES  # from the front of `came`
        self.num_started = [0] * PRIORITIES
        self.started: set[int] = set()  # still in `came`
        self.since: dict[int, int] = {}  # the step in which each that waits came
        self.priority: dict[int, int] = {}
        self.most_overtaken = 0
        self.longest_wait = 0

    def arrive(self, one: Arrival, step: int) -> None:
        self.came[one.priority].append(one.req_id)
        self.priority[one.req_id] = one.priority
        self.since[one.req_id] = step

    def start(self, req_id: int, step: int) -> None:
        """Once: one that was retracted starts again."""
        if (priority := self.priority.pop(req_id, None)) is None:
            return
        self.longest_wait = max(self.longest_wait, step - self.since.pop(req_id))
        self.num_started[priority] += 1
        self.started.add(req_id)

    def look(self) -> None:
        for priority, came in enumerate(self.came):
            while came and came[0] in self.started:
                self.started.remove(came.popleft())
                self.num_gone[priority] += 1
            if came:  # all before it have started; the rest of those that have overtook it
                self.most_overtaken = max(self.most_overtaken, self.num_started[priority] - self.num_gone[priority])


def run(policy: SchedulePolicy, num_steps: int, seed: int) -> dict[str, Any]:
    """What was seen; it stops at the first that was overtaken too often."""
    plane = make_control_plane(
        "rust_hotpath",
        ControlPlaneConfig(
            num_pages=PAGES,
            page_size=PAGE,
            max_running_requests=ROWS,
            max_prefill_length=64,
            context_len=160,
            schedule_policy=policy,
        ),
    )
    load, watch, draw = Load(seed, policy), Watch(), random.Random(seed + 1)
    in_flight: deque[tuple[int, int]] = deque()
    tokens, began, num_failed = np.zeros(ROWS, np.int32), time.perf_counter(), 0
    for step in tqdm(range(num_steps), desc=policy, mininterval=10):
        arrivals = load.arrivals(len(watch.since))
        for one in arrivals:
            watch.arrive(one, step)
        events: list[Event] = [*arrivals]
        if in_flight and draw.random() < 1e-3:
            events.insert(0, ForwardFailed(in_flight[0][0]))
            in_flight.clear()
            num_failed += 1
        plan = plane.schedule(step, Events(events))
        if plan.num_assigned:
            for req_id in plane.buffers.ring[plan.ring_index].assigned_ids[: plan.num_assigned].tolist():
                watch.start(req_id, step)
            watch.look()
        in_flight.append((step, plan.num_rows))
        while len(in_flight) > (1 if plan.num_rows else 0):
            done, rows = in_flight.popleft()
            tokens[:] = step % 9
            plane.commit(done, tokens[:rows])
        if watch.most_overtaken >= WINDOWS[policy]:
            break
    stats = plane.stats()
    return {
        "policy": policy,
        "seed": seed,
        "steps": step + 1,
        "took_s": time.perf_counter() - began,
        "requests": load._next_id,
        "waiting": len(watch.since),
        "retractions": stats.num_retracted_total,
        "failed_forwards": num_failed,
        "overtaken_at_most": watch.most_overtaken,
        "bound": WINDOWS[policy] - 1,
        "longest_wait_steps": watch.longest_wait,
        "starved": watch.most_overtaken >= WINDOWS[policy],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    policies: tuple[SchedulePolicy, ...] = ("lpm", "srpf")
    found = [run(policy, args.steps, args.seed) for policy in policies]
    text = json.dumps({"environment": environment(), "runs": found}, indent=1)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
