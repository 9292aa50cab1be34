"""Sends views of recent steps to front ends while someone watches.

Invariants: without watchers nothing is sent, and at most one step per `KEEP_EVERY_S` is stored, at a cost of less than
a hundredth of that time; the number of stored steps is limited.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from minisgl.message import WATCH_S, FromEngine, StepView, TreeView, Watched
from minisgl.metrics.steps import StepTimers
from minisgl.scheduler.api import ControlPlane
from minisgl.step import RingEntry, StepOutput, StepPlan

SEND_S = 0.1
MAX_STEPS = 64  # steps in one message
MAX_ROWS = 256  # rows in one step view
MAX_NODES = 200
KEEP_EVERY_S = 0.005


class Recent:
    """The last steps, for the next watcher. Without a watcher, steps within `KEEP_EVERY_S` of the last stored one are
    skipped. `owners` maps slots to their last request; the loop changes it."""

    def __init__(
        self, timers: StepTimers, owners: Mapping[int, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._timers = timers
        self._owners = owners
        self._clock = clock
        self._next_at = 0.0
        self._spent, self._step = totals(timers), -1

    def committed(self, plan: StepPlan, output: StepOutput, control_plane: ControlPlane) -> None:
        """Store a step that was committed while no one watches."""
        now = self._clock()
        if now < self._next_at or not plan.num_rows:
            return
        self._next_at = now + KEEP_EVERY_S
        spent, before, number = totals(self._timers), self._spent, max(1, plan.step - self._step)
        self._spent, self._step = spent, plan.step
        phases = [(after - start) / number / 1e6 for after, start in zip(spent, before, strict=True)]
        stats, entry = control_plane.stats(), control_plane.buffers.ring[plan.ring_index]
        admitted = [(int(entry.assigned_ids[i]), int(entry.assigned[i][1])) for i in range(plan.num_assigned)]
        reasons = zip(output.req_ids.tolist(), output.reasons.tolist(), strict=True)
        finished = [(req_id, reason) for req_id, reason in reasons if reason]
        self.steps.append(
            step_view(
                plan,
                phases,
                rows_of(plan, entry, self._owners, {}),
                (admitted, finished, []),
                (stats.num_waiting, stats.num_free_pages),
            )
        )


def totals(timers: StepTimers) -> tuple[int, int, int, int]:
    """Return the total nanoseconds of all steps for schedule, forward, commit and send."""
    forward = timers.launch.total_ns + timers.wait.total_ns
    return timers.schedule.total_ns, forward, timers.commit.total_ns, timers.send.total_ns


def rows_of(
    plan: StepPlan, entry: RingEntry, owners: Mapping[int, int], cached_by_slot: Mapping[int, int]
) -> list[tuple[int, bool, int, int, int]]:
    """Return the rows of a step in the format of `StepView`, at most `MAX_ROWS`."""
    num_rows, num_decode = min(plan.num_rows, MAX_ROWS), plan.num_decode_rows
    columns = (entry.req_slots, entry.extend_lens, entry.seq_lens)
    slots, new, lengths = (column[:num_rows].tolist() for column in columns)
    cached = [0 if row < num_decode else cached_by_slot.get(slot, 0) for row, slot in enumerate(slots)]
    return [(owners[slots[row]], row < num_decode, new[row], cached[row], lengths[row]) for row in range(num_rows)]


def step_view(
    plan: StepPlan,
    phases_ms: Sequence[float],
    rows: list[tuple[int, bool, int, int, int]],
    changes: tuple[list[tuple[int, int]], list[tuple[int, int]], list[int]],
    waiting_and_free: tuple[int, int],
) -> StepView:
    """Build a step's view. `changes`: (admitted requests with cached tokens, finished ones with reasons, retracted)."""
    schedule, forward, commit, send = (round(phase, 4) for phase in phases_ms)
    return StepView(
        plan.step,
        round(time.time() * 1e3 - sum(phases_ms), 2),
        (schedule, forward, commit, send),
        rows,
        changes[0],
        changes[1],
        plan.num_retracted,
        changes[2],
        *waiting_and_free,
        max(0, plan.num_rows - MAX_ROWS),
    )


class Watching:
    """Sends step views from the first `Watch` message until the last one expires. `owners` maps slots to their last
    request; `recent` has the steps to send first, and gets the new ones."""

    def __init__(
        self,
        send: Callable[[Sequence[FromEngine]], None],
        timers: StepTimers,
        owners: Mapping[int, int],
        recent: deque[StepView],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._recent = recent
        self._timers = timers
        self._clock = clock
        self._slots = dict(owners)
        self._holders = {req_id: slot for slot, req_id in owners.items()}  # includes all live requests
        self._num_retracted = 0  # retracted requests not reported yet
        self._cached: dict[int, int] = {}  # cached tokens by slot, for slots assigned since the start
        self._steps = deque(recent, MAX_STEPS)
        self._num_told = len(recent)
        self._sent_at = 0.0
        self._steps_until = 0.0
        self._wants_tree = False
        self._spent = totals(timers)

    def renew(self, *, steps: bool, tree: bool) -> None:
        """Extend the watch by `WATCH_S`, and/or request a view of the prefix tree: see `message.Watch`."""
        if steps:
            self._steps_until = self._clock() + WATCH_S
        self._wants_tree |= tree

    def committed(self, plan: StepPlan, output: StepOutput, control_plane: ControlPlane) -> bool:
        """Record a committed step. Returns False when the watch has expired."""
        now = self._clock()
        if now > self._steps_until and not self._wants_tree:
            return False
        if now <= self._steps_until:
            stats, entry = control_plane.stats(), control_plane.buffers.ring[plan.ring_index]
            if (view := self._view(plan, entry, output, stats.num_waiting, stats.num_free_pages)) is not None:
                self._steps.append(view)
                self._recent.append(view)
                self._num_told += 1
            if self._steps and (now - self._sent_at >= SEND_S or not stats.num_live):
                self._sent_at = now
                self._send([Watched(self._num_told - len(self._steps), list(self._steps))])
                self._steps.clear()
        if self._wants_tree:
            self._wants_tree = False
            self._send([Watched(self._num_told, [], TreeView(*control_plane.tree_view(MAX_NODES)))])
        return True

    def _view(
        self, plan: StepPlan, entry: RingEntry, output: StepOutput, num_waiting: int, num_free_pages: int
    ) -> StepView | None:
        """Return the view of a step, or `None` if the step did nothing."""
        spent, before = totals(self._timers), self._spent
        self._spent = spent
        phases = [(after - start) / 1e6 for after, start in zip(spent, before, strict=True)]
        reasons = zip(output.req_ids.tolist(), output.reasons.tolist(), strict=True)
        finished = [(req_id, reason) for req_id, reason in reasons if reason]
        for req_id, _ in finished:
            self._holders.pop(req_id, None)
        retracted, admitted = self._slots_of(plan, entry)
        if not (plan.num_rows or finished or retracted or plan.num_retracted):
            return None
        rows = rows_of(plan, entry, self._slots, self._cached)
        return step_view(plan, phases, rows, (admitted, finished, retracted), (num_waiting, num_free_pages))

    def _slots_of(self, plan: StepPlan, entry: RingEntry) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the requests that this step retracted, and those that it admitted with their cached tokens."""
        retracted, admitted = [], []
        self._num_retracted += plan.num_retracted
        for slot in entry.freed[: plan.num_freed].tolist():
            req_id = self._slots.get(slot)
            if req_id is not None and self._holders.get(req_id) == slot and self._num_retracted:
                self._num_retracted -= 1
                del self._holders[req_id]
                retracted.append(req_id)
        for i in range(plan.num_assigned):
            slot, cached = entry.assigned[i].tolist()
            req_id = int(entry.assigned_ids[i])
            self._holders.pop(self._slots.get(slot, req_id), None)
            self._slots[slot], self._cached[slot], self._holders[req_id] = req_id, cached, slot
            admitted.append((req_id, cached))
        return retracted, admitted
