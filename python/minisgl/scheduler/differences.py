"""Finds the fields in which two schedulers differ after the same call; used by shadow mode and by trace replay.

Invariants: fields of the plan's header come first, then its live arrays in the order of `RingEntry.__slots__`; calls
with equal results yield nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.api import ControlPlane
from minisgl.scheduler.digest import live_regions
from minisgl.step import RingEntry, StepOutput, StepPlan

OUTPUT_ARRAYS = ("req_ids", "tokens", "reasons", "rows")
PLAN_FIELDS = tuple(field.name for field in fields(StepPlan))
PER_TOKEN = ("input_ids", "positions", "out_loc")
PER_ROW = ("req_slots", "seq_lens", "extend_lens", "last_page_len")
OF_SLOTS = ("page_table_updates", "assigned", "state_begins", "page_loads")  # the first column is a request slot
WHOLE_TREE = 2**31 - 1  # nodes

Array = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two schedulers differ, with both values. `index` is the first differing element of an array
    (`None`: the field is no array), `req_id` the request that the element belongs to (`None`: none, or several)."""

    what: str
    primary: Any
    shadow: Any
    index: int | None = None
    req_id: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and the ring entry with its arrays."""

    plan: StepPlan
    entry: RingEntry


def plan_differences(ours: PlannedStep, theirs: PlannedStep, owners: Mapping[int, int]) -> Iterator[Difference]:
    """Yield the header fields and the arrays that differ. `owners` maps a request slot to its request id."""
    for name in PLAN_FIELDS:
        our_value, their_value = getattr(ours.plan, name), getattr(theirs.plan, name)
        if our_value != their_value:
            yield Difference(f"plan.{name}", our_value, their_value, req_id=owners.get(_first_slot(ours, theirs)))
    both = zip(live_regions(ours.plan, ours.entry), live_regions(theirs.plan, theirs.entry), strict=True)
    for name, (first, second) in zip(RingEntry.__slots__, both, strict=True):
        if first.tobytes() != second.tobytes():
            index = first_difference(first, second)
            longer = ours if index < len(first) else theirs
            req_id = owners.get(_slot(name, index, longer))
            yield Difference(name, first.tolist(), second.tolist(), index, req_id)


def output_differences(ours: StepOutput, theirs: StepOutput) -> Iterator[Difference]:
    """Yield the arrays of a commit's output that differ."""
    for name in OUTPUT_ARRAYS:
        our_array, their_array = getattr(ours, name), getattr(theirs, name)
        if our_array.tobytes() != their_array.tobytes():
            index = first_difference(our_array, their_array)
            ids = ours.req_ids if index < len(our_array) else theirs.req_ids
            yield Difference(f"output.{name}", our_array.tolist(), their_array.tolist(), index, int(ids[index]))


def count_differences(ours: ControlPlane, theirs: ControlPlane) -> Iterator[Difference]:
    """Yield the fields of `Stats` that differ."""
    their_stats = asdict(theirs.stats())
    for name, value in asdict(ours.stats()).items():
        if value != their_stats[name]:
            yield Difference(f"stats.{name}", value, their_stats[name])


def tree_differences(ours: ControlPlane, theirs: ControlPlane) -> Iterator[Difference]:
    """Yield the prefix caches' node counts and token counts if they differ, and the first node that differs."""
    our_tree, their_tree = ours.tree_view(WHOLE_TREE), theirs.tree_view(WHOLE_TREE)
    for name, first, second in (("num_nodes", our_tree[0], their_tree[0]), ("num_tokens", our_tree[1], their_tree[1])):
        if first != second:
            yield Difference(f"tree.{name}", first, second)
    for index, (left, right) in enumerate(zip_longest(sorted(our_tree[2]), sorted(their_tree[2]))):
        if left != right:
            yield Difference(f"tree.nodes[{index}]", left, right)
            return


def first_difference(left: Array, right: Array) -> int:
    """Return the index of the first row in which the arrays differ, or the length of the shorter one."""
    length = min(len(left), len(right))
    if not length:
        return 0
    unequal = np.flatnonzero((left[:length] != right[:length]).reshape(length, -1).any(axis=1))
    return int(unequal[0]) if len(unequal) else length


def _first_slot(ours: PlannedStep, theirs: PlannedStep) -> int:
    """Return the request slot of the first row that differs in its request or its lengths; -1 if no row does."""
    left, right = (
        np.stack([getattr(each.entry, name)[: each.plan.num_rows] for name in PER_ROW[:3]], axis=1)
        for each in (ours, theirs)
    )
    index = first_difference(left, right)
    longer = left if index < len(left) else right
    return int(longer[index][0]) if index < len(longer) else -1


def _slot(name: str, index: int, planned: PlannedStep) -> int:
    """Return the request slot that element `index` of the array `name` belongs to, or -1 if it belongs to no row."""
    entry, num_rows = planned.entry, planned.plan.num_rows
    if name in OF_SLOTS:
        return int(getattr(entry, name)[index][0])
    if name == "assigned_ids":
        return int(entry.assigned[index][0])
    if name == "page_ids":
        ends = np.cumsum(entry.page_table_updates[: planned.plan.num_page_table_updates, 2])
        return int(entry.page_table_updates[np.searchsorted(ends, index, "right")][0])
    if name in PER_TOKEN:
        row = int(np.searchsorted(entry.qo_indptr[: num_rows + 1], index, "right")) - 1
    elif name in PER_ROW:
        row = index
    elif name in ("sample_rows", "state_saves"):
        row = int(np.ravel(getattr(entry, name)[index])[0])
    else:
        row = index - 1 if name.endswith("indptr") else -1
    return int(entry.req_slots[row]) if 0 <= row < num_rows else -1
