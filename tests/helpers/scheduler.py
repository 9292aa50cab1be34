"""Driver of a scheduler without an engine, with an engine's view of slots and page tables.

Invariants: every plan is checked from an engine's view (`EngineView`); the scheduler checks itself after every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_rust_hotpath
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.step import Arrival, Event, Events, FinishReason, StepBuffers, StepOutput, StepPlan

Sampler = Callable[[int, int], int]
MAKE: dict[str, Callable[[ControlPlaneConfig, StepBuffers | None], object]] = {
    "python": ReferenceControlPlane,
    "rust_hotpath": make_rust_hotpath,
}
PLANE = "python"  # scheduler that `Driver` creates; set by the fixture `each_control_plane`


def arrival(req_id: int, tokens: Sequence[int], max_tokens: int = 4, **options: object) -> Arrival:
    """Return an arrival whose tokens are all prompt, unless `num_generated` says otherwise."""
    generated = int(options.get("num_generated", 0))  # type: ignore[call-overload]
    return Arrival(req_id, np.array(tokens, np.int32), len(tokens) - generated, max_tokens, **options)  # type: ignore[arg-type]


@dataclass
class Row:
    """Row of a plan, read from the buffers."""

    req_id: int
    slot: int
    extend_len: int
    seq_len: int
    input_ids: list[int]
    out_loc: list[int]
    samples: bool


@dataclass
class EngineView:
    """State of an engine after applying plans in order: each slot's owner and page table."""

    buffers: StepBuffers
    states: bool = False  # of the model
    drafts: bool = False  # pages of a refused draft are replaced by others at the same page indices
    owner: dict[int, int] = field(default_factory=dict)
    cached_len: dict[int, int] = field(default_factory=dict)
    table: dict[int, list[int]] = field(default_factory=dict)

    def apply(self, plan: StepPlan) -> list[Row]:
        """Apply a plan the way an engine would; asserts that its arrays are consistent. Return the real rows."""
        entry = self.buffers.ring[plan.ring_index]
        for slot in entry.freed[: plan.num_freed].tolist():
            assert slot in self.owner, "freed a slot that was not assigned"
            del self.owner[slot], self.table[slot]
        assigned = entry.assigned[: plan.num_assigned].tolist()
        for (slot, cached), req_id in zip(assigned, entry.assigned_ids[: plan.num_assigned].tolist(), strict=True):
            assert slot not in self.owner, "assigned a slot that was not freed"
            self.owner[slot], self.table[slot], self.cached_len[req_id] = req_id, [], cached
        at = 0
        for slot, column, count in entry.page_table_updates[: plan.num_page_table_updates].tolist():
            grows = column <= len(self.table[slot]) if self.drafts else column == len(self.table[slot])
            assert grows, "a page table did not grow at its end"
            self.table[slot][column:] = entry.page_ids[at : at + count].tolist()
            at += count
        assert at == plan.num_page_ids
        return self._rows(plan)

    def _rows(self, plan: StepPlan) -> list[Row]:
        entry, size = self.buffers.ring[plan.ring_index], self.buffers.limits.page_size
        samples = set(entry.sample_rows[: plan.num_samples].tolist())
        rows, written, num_pages, at = [], set(), 0, 0
        for i in range(plan.num_rows):
            slot, seq_len = int(entry.req_slots[i]), int(entry.seq_lens[i])
            count = int(entry.extend_lens[i])
            assert (entry.qo_indptr[i], entry.kv_indptr[i]) == (at, num_pages)
            assert entry.last_page_len[i] == (seq_len - 1) % size + 1
            positions = entry.positions[at : at + count].tolist()
            assert positions == list(range(seq_len - count, seq_len))
            out_loc = entry.out_loc[at : at + count].tolist()
            scratch = self.buffers.limits.num_pages
            covered = sum(place // size == scratch for place in out_loc)  # cached, and computed for the state alone
            assert out_loc[:covered] == [scratch * size + p % size for p in positions[:covered]]
            assert out_loc[covered:] == [self.table[slot][p // size] * size + p % size for p in positions[covered:]]
            assert covered == 0 or (self.states and covered % size == 0)
            out_loc = out_loc[covered:]
            assert written.isdisjoint(out_loc), "two tokens write one place"
            written.update(out_loc)
            ids = entry.input_ids[at : at + count].tolist()
            rows.append(Row(self.owner[slot], slot, count, seq_len, ids, out_loc, i in samples))
            at, num_pages = at + count, num_pages + -(-seq_len // size)
        assert at == plan.num_tokens
        assert (entry.qo_indptr[plan.num_rows], entry.kv_indptr[plan.num_rows]) == (at, num_pages)
        assert [row.samples for row in rows[: plan.num_decode_rows]] == [True] * plan.num_decode_rows
        return rows


class Driver:
    """Scheduler, the engine's view, and the outputs so far."""

    def __init__(self, sampler: Sampler | None = None, buffers: StepBuffers | None = None, **config: object) -> None:
        values: dict[str, object] = {
            "num_pages": 64,
            "page_size": 4,
            "max_running_requests": 8,
            "max_prefill_length": 64,
            "context_len": 256,
        }
        self.config = ControlPlaneConfig(**(values | config))  # type: ignore[arg-type]
        self.plane: Any = MAKE[PLANE](self.config, buffers)
        self.view = EngineView(
            self.plane.buffers, states=self.config.checkpoint_interval > 0, drafts=self.config.max_draft_len > 0
        )
        self.sampler: Sampler = sampler or (lambda req_id, position: 1000 + position)
        self.next_step = 0
        self.plans: list[StepPlan] = []
        self.rows: list[list[Row]] = []  # by step
        self.uncommitted: list[int] = []
        self.tokens: dict[int, list[int]] = {}  # generated, by request
        self.ends: dict[int, FinishReason] = {}

    def schedule(self, *events: Event) -> list[Row]:
        """Schedule the next step; return its rows."""
        plan = self.plane.schedule(self.next_step, Events(list(events)))
        self.plane.check()
        self.plans.append(plan)
        rows = self.view.apply(plan)
        self.rows.append(rows)
        self.uncommitted.append(self.next_step)
        self.next_step += 1
        return rows

    def commit(self) -> StepOutput:
        """Commit the oldest step and return its output."""
        step = self.uncommitted.pop(0)
        rows = self.rows[step]
        tokens = np.array([self.sampler(r.req_id, r.seq_len) if r.samples else -7 for r in rows], np.int32)
        output = self.plane.commit(step, tokens)
        self.plane.check()
        for req_id, token, reason in zip(
            *(a.tolist() for a in (output.req_ids, output.tokens, output.reasons)), strict=True
        ):
            assert req_id not in self.ends, "an answer after the end"
            if token >= 0:
                self.tokens.setdefault(req_id, []).append(token)
            if reason:
                self.ends[req_id] = FinishReason(reason)
        return output

    def step(self, *events: Event) -> list[Row]:
        """Schedule and commit a step, without overlap; return its rows."""
        rows = self.schedule(*events)
        self.commit()
        return rows

    def run(self, max_steps: int = 5000, overlap: bool = False) -> None:
        """Run steps until nothing is live or in flight; fails after `max_steps`."""
        for _ in range(max_steps):
            if not self.uncommitted and self.plane.stats().num_live == 0:
                return
            while len(self.uncommitted) > overlap:
                self.commit()
            if not self.schedule() or not overlap:
                while self.uncommitted:
                    self.commit()
        raise AssertionError("the scheduler did not come to an end")

    @property
    def plan(self) -> StepPlan:
        return self.plans[-1]


def crowded(num_requests: int = 3, num_steps: int = 4, **config: Any) -> Driver:
    """Run requests of 4 prompt tokens, with much to say, in a pool of 2 pages for each. The second page of each is
    taken at its first decode step, the third at its fifth, when none is left."""
    driver = Driver(num_pages=2 * num_requests, context_len=64, **config)
    driver.plane.reserve_ratio = 0
    driver.step(*[arrival(i, [10 + i] * 4, max_tokens=12) for i in range(num_requests)])
    for _ in range(num_steps):
        assert len(driver.step()) == num_requests
    assert driver.plane.stats().num_free_pages == 0
    return driver


def lengths(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Return (request id, extend length) by row."""
    return [(row.req_id, row.extend_len) for row in rows]
