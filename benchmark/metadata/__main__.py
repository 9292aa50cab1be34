"""Time of building a step's metadata: per-request Python loops beside `schedule()` of both schedulers, in one run.

    python -m benchmark.metadata [--steps 300] [--out FOLDER]

The loops (loops.py) only fill arrays for rows that are given. `schedule()` also decides the step, allocates pages,
extends the prefix tree and lists page-table updates, so the comparison favours the loops. Step by step the three take
turns. The last line of stdout is JSON with medians in us.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmark.metadata.loops import Row, build
from minisgl.bench.report import Report, print_result, table
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import Abort, Arrival, Event, Events, StepPlan

LOOPS = "python loops"
PLANES = ("python", "rust_hotpath")
TOKEN = 7


class Scenario:
    """One scheduler under a load; `step` runs the next step and returns the plan and the time of `schedule`."""

    def __init__(self, plane: ControlPlane, num_rows: int) -> None:
        self.plane = plane
        self._tokens = np.full(num_rows, TOKEN, np.int32)
        self._step = 0

    def step(self, events: Sequence[Event] = ()) -> tuple[StepPlan, float]:
        given = Events(list(events))
        began = time.perf_counter_ns()
        plan = self.plane.schedule(self._step, given)
        passed = (time.perf_counter_ns() - began) / 1000
        self.plane.commit(self._step, self._tokens[: plan.num_rows])
        self._step += 1
        return plan, passed


class Tables:
    """The rows of a plan as objects with lists, for the loops: tokens and pages by slot, kept from step to step."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._pages: dict[int, list[int]] = {}

    def rows(self, scenario: Scenario, plan: StepPlan) -> list[Row]:
        entry = scenario.plane.buffers.ring[plan.ring_index]
        for slot, _ in entry.assigned[: plan.num_assigned].tolist():
            self._tokens[slot], self._pages[slot] = [], []
        at = 0
        for slot, first, count in entry.page_table_updates[: plan.num_page_table_updates].tolist():
            self._pages[slot][first:] = entry.page_ids[at : at + count].tolist()
            at += count
        rows = []
        bounds = entry.qo_indptr[: plan.num_rows + 1].tolist()
        for i in range(plan.num_rows):
            slot, kv_len = int(entry.req_slots[i]), int(entry.seq_lens[i])
            start, end = bounds[i], bounds[i + 1]
            self._tokens[slot][kv_len - (end - start) :] = entry.input_ids[start:end].tolist()
            rows.append(Row(slot, self._tokens[slot], self._pages[slot], kv_len, end - start))
        return rows


def arrival(req_id: int, length: int, max_tokens: int) -> Arrival:
    """Its first tokens spell the id: no two prompts share a page."""
    tokens = np.full(length, 3, np.int32)
    tokens[0] = 1000 + req_id
    return Arrival(req_id, tokens, length, max_tokens)


def decode(batch: int, page_size: int) -> Callable[[int], dict[str, list[float]]]:
    """`batch` rows decode from 512 tokens on."""

    def case(steps: int) -> dict[str, list[float]]:
        length = 512 + steps + 16
        config = ControlPlaneConfig(batch * 2 * length // page_size, page_size, batch, batch * 512, 4 * length)
        return run(config, [arrival(i, 512, steps + 16) for i in range(batch)], steps, batch)

    return case


def prefill(batch: int, length: int, page_size: int) -> Callable[[int], dict[str, list[float]]]:
    """`batch` new prompts in every measured step."""

    def case(steps: int) -> dict[str, list[float]]:
        steps = max(steps // 10, 3)
        config = ControlPlaneConfig((steps + 9) * batch * (length + page_size), page_size, batch, batch * length, 4096)
        return run(config, [], steps, batch, prefill_len=length)

    return case


def run(
    config: ControlPlaneConfig, first: Sequence[Event], steps: int, batch: int, prefill_len: int = 0
) -> dict[str, list[float]]:
    """us of each measured step by builder."""
    scenarios = {name: Scenario(make_control_plane(name, config), batch) for name in PLANES}
    times: dict[str, list[float]] = {name: [] for name in (LOOPS, *PLANES)}
    tables = Tables()
    for scenario in scenarios.values():
        plan, _ = scenario.step(first)
        if scenario is scenarios["python"]:
            tables.rows(scenario, plan)
    warm, next_id = 5, len(first)
    for number in range(warm + steps):
        events = [arrival(next_id + i, prefill_len, 4) for i in range(batch)] if prefill_len else []
        next_id += len(events)
        passed = {}
        for name, scenario in scenarios.items():
            plan, passed[name] = scenario.step(events)
            assert plan.num_rows == batch and plan.num_tokens == batch * (prefill_len or 1)
            if name == "python":
                rows = tables.rows(scenario, plan)
        began = time.perf_counter_ns()
        build(rows, config.page_size)
        passed[LOOPS] = (time.perf_counter_ns() - began) / 1000
        if number >= warm:
            for name, value in passed.items():
                times[name].append(value)
        for scenario in scenarios.values() if events else ():
            scenario.step([Abort(event.req_id) for event in events])
    return times


CASES: dict[str, Callable[[int], dict[str, list[float]]]] = {
    "decode 1": decode(1, 16),
    "decode 32": decode(32, 16),
    "decode 256": decode(256, 16),
    "decode 512": decode(512, 16),
    "prefill 16 x 512": prefill(16, 512, 16),
}


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.metadata", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="folder for raw.json and README.md")
    options = parser.parse_args(args)
    command = f"python -m benchmark.metadata --steps {options.steps}"
    report = None if options.out is None else Report(options.out, "Metadata of a step", command=command)
    gc.collect()
    gc.disable()
    try:
        times = {name: case(options.steps) for name, case in CASES.items()}
    finally:
        gc.enable()
    medians = {case: {name: statistics.median(v) for name, v in found.items()} for case, found in times.items()}
    rows = [
        (case, *by_name.values(), f"{by_name[LOOPS] / by_name['rust_hotpath']:.0f}x")
        for case, by_name in medians.items()
    ]
    figures = table(("us per step", LOOPS, *(f"schedule(), {name}" for name in PLANES), "loops / rust"), rows)
    print(figures)
    if report is not None:
        report.section(
            "Median time of a step",
            "The loops only fill arrays for rows that are given; `schedule()` also decides the step, allocates pages "
            "and extends the prefix tree. All three in turns, step by step; page size 16, 512 tokens of context.",
            figures,
        )
        report.write({"us": times})
    print_result({"benchmark": "metadata", "us": medians})
    return 0


if __name__ == "__main__":
    sys.exit(main())
