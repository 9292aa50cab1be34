"""Small fixed scenarios for a control plane, and the digests of every decision it makes in them.

`python -m tests.replay.record` writes `decisions.json` anew; commit that only with the reason why decisions changed.

Keeps true: events and tokens come from an integer generator that is written out here, so that every machine, Python
version and implementation sees the same ones.
Doesn't know: whether the decisions are good; other tests do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.reference.digest import output_digest, plan_digest
from minisgl.step import Abort, Arrival, Event, Events, ForwardFailed, StepPlan

DECISIONS = Path(__file__).with_name("decisions.json")
EOS = 99
MAX_STEPS = 2000


class Numbers:
    """Knuth's 64-bit linear congruential generator (MMIX); the upper half of its state, reduced to a range."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, bound: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 32) % bound

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)


@dataclass(frozen=True)
class Scenario:
    """`num_requests` arrive, `burst` at a time, every `gap` steps; each prompt is `shared_len` common tokens, then own
    ones. `abort_every` n: at each n-th step one of the requests so far is aborted, ended or not."""

    num_requests: int
    prompt_len: tuple[int, int]
    max_tokens: tuple[int, int]
    burst: int = 1
    gap: int = 1
    shared_len: int = 0
    abort_every: int = 0
    fail_at: tuple[int, ...] = ()
    num_priorities: int = 1
    overlap: bool = True
    config: dict[str, object] = field(default_factory=dict)

    def control_plane_config(self) -> ControlPlaneConfig:
        values: dict[str, object] = {
            "num_pages": 256,
            "page_size": 4,
            "max_running_requests": 8,
            "max_prefill_length": 64,
            "context_len": 512,
            "eos_ids": (EOS,),
        }
        return ControlPlaneConfig(**(values | self.config))  # type: ignore[arg-type]


SCENARIOS = {
    "short": Scenario(40, (1, 12), (1, 16), gap=2, config={"graph_sizes": (1, 2, 4, 8)}),
    "long": Scenario(8, (100, 400), (4, 40), gap=5, config={"page_size": 16, "num_pages": 128}),
    "shared_prefix": Scenario(40, (1, 30), (1, 16), shared_len=70),
    "bursty": Scenario(60, (4, 60), (1, 24), burst=12, gap=15, num_priorities=3, config={"max_running_requests": 16}),
    "retraction": Scenario(30, (4, 20), (40, 80), burst=4, gap=4, config={"num_pages": 48, "page_size": 2}),
    "aborts": Scenario(60, (1, 50), (1, 40), burst=3, abort_every=2, shared_len=9, config={"page_size": 1}),
    "failures": Scenario(30, (1, 40), (4, 20), burst=2, shared_len=12, fail_at=(3, 11, 30)),
    "no_overlap": Scenario(30, (1, 40), (1, 20), overlap=False, config={"cache": "lfu", "num_pages": 40}),
    "naive": Scenario(30, (1, 40), (1, 20), shared_len=20, config={"cache": "naive", "num_pages": 64}),
}


def events_of(scenario: Scenario, step: int, ids: list[int], numbers: Numbers) -> Iterator[Event]:
    """The events of `step` but for failures; ids that arrive are appended to `ids`."""
    if step % scenario.gap == 0:
        for _ in range(min(scenario.burst, scenario.num_requests - len(ids))):
            own = [numbers.below(50) for _ in range(numbers.between(*scenario.prompt_len))]
            tokens = np.array([*range(scenario.shared_len), *own], np.int32)
            max_tokens, priority = numbers.between(*scenario.max_tokens), numbers.below(scenario.num_priorities)
            ids.append(len(ids))
            yield Arrival(ids[-1], tokens, len(tokens), max_tokens, priority=priority)
    if ids and scenario.abort_every and step % scenario.abort_every == 0:
        yield Abort(ids[numbers.below(len(ids))])


def decisions(scenario: Scenario, plane: ControlPlane) -> Iterator[str]:
    """Drive `plane` to the end of the scenario; one line of two digests (a plan, or an output) per call."""
    numbers, sampled, ids = Numbers(1), Numbers(2), list[int]()
    in_flight: list[tuple[int, int]] = []  # step, rows

    def commit() -> str:
        step, num_rows = in_flight.pop(0)
        tokens = np.array([EOS if sampled.below(40) == 0 else sampled.below(50) for _ in range(num_rows)], np.int32)
        return f"commit {step} {output_digest(plane.commit(step, tokens)):016x}"

    for step in range(MAX_STEPS):
        events = list(events_of(scenario, step, ids, numbers))
        if step in scenario.fail_at and in_flight:
            events.insert(0, ForwardFailed(in_flight[0][0]))
            in_flight.clear()
        plan: StepPlan = plane.schedule(step, Events(events))
        yield f"schedule {step} {plan_digest(plan, plane.buffers):016x}"
        in_flight.append((step, plan.num_rows))
        idle = plane.stats().num_live == 0
        while len(in_flight) > scenario.overlap or (in_flight and idle):
            yield commit()
        if idle and plane.stats().num_live == 0 and len(ids) == scenario.num_requests:
            return
    raise AssertionError("the scenario did not come to an end")


def record(make: Callable[[ControlPlaneConfig], ControlPlane]) -> dict[str, list[str]]:
    return {name: list(decisions(s, make(s.control_plane_config()))) for name, s in SCENARIOS.items()}


def main() -> None:
    DECISIONS.write_text(json.dumps(record(lambda config: make_control_plane("python", config)), indent=0) + "\n")


if __name__ == "__main__":
    main()
