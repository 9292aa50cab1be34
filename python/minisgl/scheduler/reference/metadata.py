"""Writes a decided step into its ring entry: what the engine reads.

Invariants: every live region named in `RingEntry` is written in full at each step; nothing grows with the context
length of a decoding row. Decode rows cost a few list passes in all; prefill rows a few slices each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl.scheduler.reference import decode_set
from minisgl.scheduler.reference.request import Request
from minisgl.step import RingEntry, StepLimits, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """A prefill row of the step: `num_tokens` computed, page-table columns from `first_column` on are new."""

    request: Request
    num_tokens: int
    first_column: int
    samples: bool  # its chunk reaches the end of the known sequence
    num_covered: int  # of its tokens, the first ones whose KV is cached: it writes none for them
    begins: int | None  # the checkpoint that its state begins with, as in the plan; None if it has its state
    saves: list[tuple[int, int]]  # tokens into the row, and to which checkpoint its state goes then
    num_loads: int = 0  # pages before its tokens that are loaded


@dataclass(slots=True, eq=False)
class DecidedStep:
    """What the pass decides, in request order. Slots are `freed`, then `assigned`, before the page-table updates."""

    step: int
    decode_rows: list[Request] = field(default_factory=list)
    drafting: list[Request] = field(default_factory=list)  # those of them whose drafts are computed
    num_draft_rows: int = 0
    prefill_rows: list[PrefillRow] = field(default_factory=list)
    assigned: list[tuple[Request, int]] = field(default_factory=list)  # with the cached length in tokens
    freed: list[int] = field(default_factory=list)  # slots
    num_retracted: int = 0
    num_gave_way: int = 0  # of them, those in the background
    num_prefill_page_changes: int = 0
    tail_saves: list[tuple[int, int, int]] = field(default_factory=list)  # of decode rows, as in the plan
    num_background: int = 0  # tokens of rows in the background

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

    def seq_lens(self) -> list[int]:
        lens = [request.kv_len for request in self.decode_rows] + [at + 1 for _, at, _ in self.draft_rows()]
        return lens + [row.request.kv_len for row in self.prefill_rows]

    def drafts(self) -> dict[int, tuple[int, int]]:
        """By row: the position of the drafted token that it computes, and the token."""
        return {row: (at, token) for row, (_, at, token) in enumerate(self.draft_rows(), len(self.decode_rows))}

    def draft_rows(self) -> list[tuple[Request, int, int]]:
        """A decode row for each drafted token: its position and the token."""
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
    """The smallest graph size that holds the rows, if each has one token; else, and without rows, their number."""
    num_rows = decided.num_rows
    if num_rows and all(row.num_tokens == 1 for row in decided.prefill_rows):
        return min((size for size in graph_sizes if size >= num_rows), default=num_rows)
    return num_rows


def write_step(decided: DecidedStep, entry: RingEntry, limits: StepLimits, graph_sizes: tuple[int, ...]) -> StepPlan:
    """Write all live regions of `entry`; returns the header, but for the ring index and the page counts."""
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
    _write_rows(plan, decided, entry, limits)
    _write_decode_tokens(plan, decided, entry, limits)
    _write_prefill_tokens(plan, decided, entry, limits)
    _write_padding(plan, entry, limits)
    _write_page_changes(plan, decided, entry, limits)
    _write_slots(decided, entry)
    _write_states(plan, decided, entry)
    _write_loads(plan, decided, entry, limits)
    return plan


def _write_rows(plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits) -> None:
    """Per row, padding included: one token of the scratch slot each."""
    n, end = plan.num_rows, plan.padded_rows
    entry.req_slots[:n] = [request.slot for request in decided.rows()]
    entry.seq_lens[:n] = decided.seq_lens()
    entry.extend_lens[: plan.num_decode_rows] = 1
    entry.extend_lens[plan.num_decode_rows : n] = [row.num_tokens for row in decided.prefill_rows]
    entry.req_slots[n:end] = limits.scratch_slot
    entry.seq_lens[n:end] = 1
    entry.extend_lens[n:end] = 1
    last = entry.seq_lens[:end] - 1
    entry.last_page_len[:end] = last % limits.page_size + 1
    entry.qo_indptr[0] = entry.kv_indptr[0] = 0
    np.cumsum(entry.extend_lens[:end], out=entry.qo_indptr[1 : end + 1])
    np.cumsum(last // limits.page_size + 1, out=entry.kv_indptr[1 : end + 1])
    plan.num_tokens = int(entry.qo_indptr[n])


def _write_decode_tokens(plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits) -> None:
    n, size = plan.num_decode_rows, limits.page_size
    positions, draft_rows = entry.seq_lens[:n] - 1, decided.draft_rows()
    entry.input_ids[:n] = [decode_set.input_token(request) for request in decided.decode_rows] + [
        token for _, _, token in draft_rows
    ]
    entry.positions[:n] = positions
    entry.out_loc[:n] = _last_pages(decided, size) + [request.pages[at // size] for request, at, _ in draft_rows]
    entry.out_loc[:n] *= size
    entry.out_loc[:n] += positions % size


def _last_pages(decided: DecidedStep, size: int) -> list[int]:
    """The length of decode rows. Behind it may lie pages of a draft."""
    return [request.pages[(request.kv_len - 1) // size] for request in decided.decode_rows]


def _write_prefill_tokens(plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits) -> None:
    at, size = plan.num_decode_rows, limits.page_size
    for row in decided.prefill_rows:
        end = row.request.kv_len
        start, to = end - row.num_tokens, at + row.num_tokens
        positions = np.arange(start, end, dtype=np.int32)
        new_pages = np.array(row.request.pages[start // size :], np.int32)
        entry.input_ids[at:to] = row.request.tokens[start:end]
        entry.positions[at:to] = positions
        new_pages[: row.num_covered // size] = limits.scratch_page
        entry.out_loc[at:to] = new_pages[positions // size - start // size] * size + positions % size
        at = to


def _write_padding(plan: StepPlan, entry: RingEntry, limits: StepLimits) -> None:
    at, to = plan.num_tokens, plan.num_tokens + plan.padded_rows - plan.num_rows
    entry.input_ids[at:to] = 0
    entry.positions[at:to] = 0
    entry.out_loc[at:to] = limits.scratch_page * limits.page_size


def _write_page_changes(plan: StepPlan, decided: DecidedStep, entry: RingEntry, limits: StepLimits) -> None:
    """(slot, first column, count) per row that got pages; a row's new columns are contiguous."""
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
