"""Writes a decided step into its ring entry, which the engine reads.

Invariants: every live region named in `RingEntry` is written in full in each step; the cost does not grow with the
context length of a decode row. Decode rows cost a few list passes in all, prefill rows a few slices each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.scheduler.parts import MakeMetadata
from minisgl.scheduler.reference import decode_set
from minisgl.scheduler.reference.request import Request
from minisgl.step import Int32Array, RingEntry, StepLimits, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """A prefill row of the step: it computes `num_tokens`; page-table columns from `first_column` on are new."""

    request: Request
    num_tokens: int
    first_column: int
    samples: bool  # whether its chunk ends the known sequence
    num_covered: int  # leading tokens whose KV is cached and not written
    begins: int | None  # checkpoint of its initial state, as in the plan; None: it continues with its own
    saves: list[tuple[int, int]]  # (tokens of the row, checkpoint slot that gets the state after them)
    num_loads: int = 0  # pages to load before its tokens


@dataclass(slots=True, eq=False)
class DecidedStep:
    """The decisions of a step, in request order. Slots are `freed`, then `assigned`, before the page-table updates."""

    step: int
    decode_rows: list[Request] = field(default_factory=list)
    drafting: list[Request] = field(default_factory=list)  # requests with draft rows
    num_draft_rows: int = 0
    prefill_rows: list[PrefillRow] = field(default_factory=list)
    assigned: list[tuple[Request, int]] = field(default_factory=list)  # with the cached length in tokens
    freed: list[int] = field(default_factory=list)  # slots
    num_retracted: int = 0
    num_gave_way: int = 0  # retracted low-priority requests
    num_prefill_page_changes: int = 0
    tail_saves: list[tuple[int, int, int]] = field(default_factory=list)  # states that decode rows save, as in the plan
    num_background: int = 0  # tokens of low-priority rows

    @property
    def num_decode_rows(self) -> int:
        return len(self.decode_rows) + self.num_draft_rows

    @property
    def num_rows(self) -> int:
        return self.num_decode_rows + len(self.prefill_rows)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + sum(row.num_tokens for row in self.prefill_rows)

    def rows(self) -> list[Request]:
        draft_rows = [request for request, _, _ in self.draft_rows()]
        return self.decode_rows + draft_rows + [row.request for row in self.prefill_rows]

    def drafts(self) -> dict[int, tuple[int, int]]:
        """Return, by row index, the position and the id of the draft token that the row computes."""
        return {row: (at, token) for row, (_, at, token) in enumerate(self.draft_rows(), len(self.decode_rows))}

    def draft_rows(self) -> list[tuple[Request, int, int]]:
        """Return a (request, position, token) for each draft token, each of which has a decode row."""
        rows = []
        for request in self.drafting:
            if request.drafter is not None:
                rows += [(request, at, token) for at, token in enumerate(request.drafter.in_flight, request.kv_len)]
        return rows

    def sample_rows(self) -> list[int]:
        num_decode = self.num_decode_rows
        samples = list(range(num_decode))
        samples += [num_decode + i for i, row in enumerate(self.prefill_rows) if row.samples]
        return samples


def padded_rows(decided: DecidedStep, graph_sizes: tuple[int, ...]) -> int:
    """Return the smallest graph size that holds the rows if each has one token, else the number of rows. A step without
    rows is not padded."""
    num_rows = decided.num_rows
    if num_rows and all(row.num_tokens == 1 for row in decided.prefill_rows):
        return min((size for size in graph_sizes if size >= num_rows), default=num_rows)
    return num_rows


def write_step(
    decided: DecidedStep,
    entry: RingEntry,
    limits: StepLimits,
    graph_sizes: tuple[int, ...],
    make_metadata: MakeMetadata,
) -> StepPlan:
    """Write all live regions of `entry`. Returns the plan's header without the ring index and the page counts."""
    samples = decided.sample_rows()
    plan = StepPlan(
        step=decided.step,
        num_rows=decided.num_rows,
        num_decode_rows=decided.num_decode_rows,
        padded_rows=padded_rows(decided, graph_sizes),
        num_samples=len(samples),
        num_assigned=len(decided.assigned),
        num_freed=len(decided.freed),
        num_retracted=decided.num_retracted,
        num_background=decided.num_background,
    )
    entry.sample_rows[: len(samples)] = samples
    _write_rows(plan, decided, entry, limits, make_metadata)
    _write_page_changes(plan, decided, entry, limits)
    _write_slots(decided, entry)
    _write_states(plan, decided, entry)
    _write_loads(plan, decided, entry, limits)
    return plan


def _write_rows(
    plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits, make_metadata: MakeMetadata
) -> None:
    """Write the arrays per row and per token. A padding row is one token of the scratch slot, on the scratch page."""
    size, draft_rows = limits.page_size, decided.draft_rows()
    num_padding = plan.padded_rows - plan.num_rows
    slots = [request.slot for request in decided.rows()] + [limits.scratch_slot] * num_padding
    inputs = [decode_set.input_token(request) for request in decided.decode_rows]
    inputs += [token for _, _, token in draft_rows]
    starts = [request.kv_len - 1 for request in decided.decode_rows] + [at for _, at, _ in draft_rows]
    lens = [1] * plan.num_decode_rows
    pages = [request.pages[(request.kv_len - 1) // size] for request in decided.decode_rows]
    pages += [request.pages[at // size] for request, at, _ in draft_rows]
    for row in decided.prefill_rows:
        end = row.request.kv_len
        start = end - row.num_tokens
        covered = row.num_covered // size
        inputs += row.request.tokens[start:end]
        pages += [limits.scratch_page] * covered
        pages += row.request.pages[start // size + covered :]
        starts.append(start)
        lens.append(row.num_tokens)
    plan.num_tokens = len(inputs)
    if num_padding:
        starts += [0] * num_padding
        inputs += [0] * num_padding
        lens += [1] * num_padding
        pages += [limits.scratch_page] * num_padding
    made = make_metadata(starts, lens, pages, size)
    for name in MADE:
        getattr(entry, name)[: len(made[name])] = made[name]
    entry.input_ids[: len(inputs)] = inputs
    entry.req_slots[: len(slots)] = slots
    entry.extend_lens[: len(slots)] = lens


MADE = ("positions", "out_loc", "seq_lens", "last_page_len", "qo_indptr", "kv_indptr")


def make_metadata_buffers(
    starts: list[int], extend_lens: list[int], pages: list[int], page_size: int = 1
) -> dict[str, Int32Array]:
    """Implementation of `MakeMetadata` with numpy."""
    first, lens, table = (np.array(values, np.int32) for values in (starts, extend_lens, pages))
    ends = first + lens
    qo_indptr, kv_indptr = np.zeros((2, len(first) + 1), np.int32)
    np.cumsum(lens, out=qo_indptr[1:])
    last = ends - 1
    num_pages = last // page_size + 1
    np.cumsum(num_pages, out=kv_indptr[1:])
    if qo_indptr[-1] == len(first):  # each row has one token
        positions, own = first, table
    else:
        positions = np.arange(qo_indptr[-1], dtype=np.int32) + np.repeat(first - qo_indptr[:-1], lens)
        before = np.cumsum(num_pages - first // page_size, dtype=np.int32) - num_pages  # of column 0
        own = table[positions // page_size + np.repeat(before, lens)]
    out_loc = own * page_size + positions % page_size
    made = (positions, out_loc, ends, last % page_size + 1, qo_indptr, kv_indptr)
    return dict(zip(MADE, made, strict=True))


def _write_page_changes(plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits) -> None:
    """Write the page-table updates, (slot, first column, count) for each row with new pages, and the page ids. A row's
    new columns are contiguous."""
    updates: list[tuple[int, int, int]] = []
    page_ids: list[int] = []
    size = limits.page_size
    inputs = [(request, request.kv_len - 1) for request in decided.decode_rows]
    inputs += [(request, position) for request, position, _ in decided.draft_rows()]
    for request, position in inputs:
        if position % size == 0:
            updates.append((request.slot, position // size, 1))
            page_ids.append(request.pages[position // size])
    for row in decided.prefill_rows:
        new_pages = row.request.pages[row.first_column :]
        updates.append((row.request.slot, row.first_column, len(new_pages)))
        page_ids += new_pages
    if updates:
        entry.page_table_updates[: len(updates)] = updates
        entry.page_ids[: len(page_ids)] = page_ids
    plan.num_page_table_updates, plan.num_page_ids = len(updates), len(page_ids)


def _write_slots(decided: DecidedStep, entry: RingEntry) -> None:
    if decided.assigned:
        count = len(decided.assigned)
        entry.assigned[:count] = [(request.slot, cached_len) for request, cached_len in decided.assigned]
        entry.assigned_ids[:count] = [request.req_id for request, _ in decided.assigned]
    entry.freed[: len(decided.freed)] = decided.freed


def _write_states(plan: StepPlan, decided: DecidedStep, entry: RingEntry) -> None:
    begins = [(row.request.slot, row.begins) for row in decided.prefill_rows if row.begins is not None]
    saves = list(decided.tail_saves)
    for at, row in enumerate(decided.prefill_rows, plan.num_decode_rows):
        saves += [(at, tokens, slot) for tokens, slot in row.saves]
    if begins:
        entry.state_begins[: len(begins)] = begins
    if saves:
        entry.state_saves[: len(saves)] = saves
    plan.num_state_begins, plan.num_state_saves = len(begins), len(saves)


def _write_loads(plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits) -> None:
    loads = []
    for row in decided.prefill_rows:
        if row.num_loads:
            end = (row.request.kv_len - row.num_tokens) // limits.page_size
            loads.append((row.request.slot, end - row.num_loads, row.num_loads))
    if loads:
        entry.page_loads[: len(loads)] = loads
    plan.num_page_loads = len(loads)
