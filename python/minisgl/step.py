"""The data that is exchanged between the scheduler and the engine.

`Events` go into ``ControlPlane.schedule``, which returns a `StepPlan` and fills the arrays of a `StepBuffers`. The
engine runs the plan. The sampled tokens go into ``ControlPlane.commit``, which returns a `StepOutput`.
Invariants: all step data is int32, in arrays that are allocated once and written in place. Nothing here knows which
scheduler or engine is used, or what a token means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


NOT_FINITE = -2
"""Value in place of a row's token if its logits are not finite. Its request ends, and none of it is cached."""


FROM_STORE = -2
"""Value in place of a slot's first state snapshot: the state that is loaded with the slot's stored pages."""


class FinishReason(IntEnum):
    """Reason for a request's end. Every accepted request gets exactly one of the last four."""

    NONE = 0
    STOP = 1  # a stop token was sampled, or a stop string was found
    LENGTH = 2  # max_tokens, the context, or the KV pool is used up
    ABORT = 3
    ERROR = 4  # refused, its forward failed, or its logits are not finite


# --------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A new request, or one that is added again with the tokens it generated so far (failover).

    `tokens` holds prompt and generated ids, [num_prompt + num_generated] int32. `max_tokens` limits the generated ids,
    including those in `tokens`. A smaller `priority` goes first; each unit is worth 64 arrivals. `stop_ids` always end
    the request; the model's own EOS ids (in `ControlPlaneConfig`) do unless `ignore_eos`; neither before `min_tokens`
    generated ids. Pages `stored_from` to `stored_to` of `tokens` can be loaded from the engine's page store instead of
    being computed, until the request is retracted; for a model with states, the state after the last of them too.
    """

    req_id: int
    tokens: Int32Array
    num_prompt: int
    max_tokens: int
    num_generated: int = 0
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    priority: int = 0
    no_overlap: bool = False  # schedule a row only after its last token is committed
    no_match: bool = False  # compute every prompt token (prompt logprobs)
    background: bool = False  # low priority: it delays no other request
    pin: bool = False  # at its end, the full pages of its prompt stay cached until `Unpin`
    namespace: int = 0  # shares cached prefixes within it only (by adapter; 0: the model's own)
    no_drafts: bool = False  # takes no drafts, as each token changes the next one's logits (penalties)
    stored_from: int = 0
    stored_to: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Event: a stop string was found in the request's text; it ends with STOP. No-op if it has ended already."""

    req_id: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Event: the client has disconnected or canceled the request. No-op if the request has ended already."""

    req_id: int


@dataclass(frozen=True, slots=True)
class ForwardFailed:
    """Event: the forward of `step` failed. Replaces the commits of `step` and the next one; first of its call."""

    step: int


@dataclass(frozen=True, slots=True)
class Unpin:
    """Event: the pages that request `req_id` has pinned may be evicted. No-op if it has pinned none."""

    req_id: int


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Event: free every page of the prefix tree that no live request and no pin holds."""


TOKEN_PARTS = 1024  # units of a token in `TokenBudget.background`
UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Event: new token limits per step, from now on: `beside_decode` while decode rows run and `prefill_only`
    otherwise, both at most `max_prefill_length`, which is the limit before the first such event. The component that
    measures step times sends it. `background` is the number of tokens, in units of 1 / `TOKEN_PARTS`, that background
    requests may add to a step with other requests; `UNBOUNDED` is no limit. See `scheduler.reference.background`."""

    beside_decode: int
    prefill_only: int
    background: int = UNBOUNDED


@dataclass(frozen=True, slots=True)
class PagesRead:
    """Event: pages `stored_from` to `stored_to` of a retracted, waiting request can be loaded from the page store, as
    in `Arrival`. No-op if the request no longer waits."""

    req_id: int
    stored_from: int
    stored_to: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Event: draft `tokens` that may follow the first `length` tokens of the request's sequence. They replace n-gram
    drafts, up to the draft length. No-op if the sequence has another length or takes no drafts now."""

    req_id: int
    length: int
    tokens: tuple[int, ...]


Event = Arrival | Finish | Abort | ForwardFailed | Unpin | ClearCache | TokenBudget | PagesRead | Draft


@dataclass(slots=True)
class Events:
    """Every input of one ``schedule`` call, in order."""

    items: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.items.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class EventError(ValueError):
    """A malformed event: its `index` in the `Events`, `field` and `reason`. The call changed nothing."""

    def __init__(self, index: int, field: str, reason: str) -> None:
        super().__init__(f"event {index}: {field}: {reason}")
        self.index = index
        self.field = field
        self.reason = reason


# ----------------------------------------------------------------------------------------------------------- plan


@dataclass(slots=True)
class StepPlan:
    """The fixed-size header of a scheduled step. Its arrays are those of ``StepBuffers.ring[ring_index]``."""

    step: int = 0
    ring_index: int = 0
    num_rows: int = 0  # decode rows come first, then prefill rows; each part in request order
    num_decode_rows: int = 0  # draft rows come last: a slot again, at its next positions
    padded_rows: int = 0  # >= num_rows; more only if every row has extend_len 1 and a graph size is configured
    num_tokens: int = 0  # sum of extend_lens of the real rows
    num_samples: int = 0
    num_page_table_updates: int = 0
    num_page_ids: int = 0
    num_assigned: int = 0
    num_freed: int = 0
    num_retracted: int = 0
    num_free_pages: int = 0
    num_evictable_pages: int = 0
    num_state_begins: int = 0
    num_state_saves: int = 0
    num_page_loads: int = 0
    num_background: int = 0  # tokens of background requests, included in `num_tokens`


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Array sizes that every scheduler derives from the configuration in the same way.

    Request slots are 0 .. max_rows - 1; `scratch_slot` = max_rows is for padding rows. Pages are 0 .. num_pages - 1;
    `scratch_page` = num_pages is for padding rows. So an engine allocates one slot and one page more than these counts.
    """

    max_rows: int
    max_tokens: int  # of one step
    page_size: int
    num_pages: int
    max_seq_len: int  # total length of one request: min(context, num_pages * page_size + 1)
    num_checkpoints: int = 0  # state snapshots, in addition to each request slot's state

    @property
    def scratch_slot(self) -> int:
        return self.max_rows

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    @property
    def max_pages_per_request(self) -> int:
        """Columns of the page table. The last token of a request needs no KV, yet may be on a page of its own."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def max_page_changes(self) -> int:
        """Page-table entries that one step may change at most. `max_rows` are reserved for decode rows (a page each); a
        prefill row whose entries, cached prefix included, do not fit into the rest waits for the next step."""
        return self.max_rows + max(self.max_pages_per_request, min(self.num_pages, 65_536))


class RingEntry:
    """The arrays of one step. The counts of the plan say how much of each array is valid; the rest is undefined."""

    __slots__ = (
        "input_ids",
        "positions",
        "out_loc",
        "req_slots",
        "seq_lens",
        "extend_lens",
        "qo_indptr",
        "kv_indptr",
        "last_page_len",
        "sample_rows",
        "page_table_updates",
        "page_ids",
        "assigned",
        "assigned_ids",
        "freed",
        "state_begins",
        "state_saves",
        "page_loads",
    )

    def __init__(self, limits: StepLimits, max_padded_rows: int) -> None:
        rows, tokens = max_padded_rows, limits.max_tokens + max_padded_rows

        def zeros(*shape: int) -> Int32Array:
            return np.zeros(shape, np.int32)

        # per token, [num_tokens + padding rows]. An id not known to the host yet is -(req_slot + 1).
        self.input_ids = zeros(tokens)
        self.positions = zeros(tokens)
        self.out_loc = zeros(tokens)  # page * page_size + position % page_size
        # per row, [padded_rows]
        self.req_slots = zeros(rows)
        self.seq_lens = zeros(rows)  # tokens whose KV exists after this step
        self.extend_lens = zeros(rows)  # tokens of these that this step computes, >= 1
        self.qo_indptr = zeros(rows + 1)  # prefix sums of extend_lens
        self.kv_indptr = zeros(rows + 1)  # prefix sums of pages per row
        self.last_page_len = zeros(rows)  # 1 .. page_size
        self.sample_rows = zeros(rows)  # [num_samples] the rows that yield a token, ascending
        # page-table updates: [num_page_table_updates] (req_slot, first page index, count) over page_ids [num_page_ids]
        self.page_table_updates = zeros(rows, 3)
        self.page_ids = zeros(limits.max_page_changes)
        # slots, applied in forward order before the page-table updates: first freed, then assigned
        self.assigned = zeros(limits.max_rows, 2)  # [num_assigned] (req_slot, cached length in tokens)
        self.assigned_ids: Int64Array = np.zeros(limits.max_rows, np.int64)  # [num_assigned] request ids
        self.freed = zeros(limits.max_rows)  # [num_freed] req_slots
        # states: [num_state_begins] (req_slot, snapshot to begin with; -1: zero; or `FROM_STORE`) before the forward;
        # [num_state_saves] (row, tokens of the row after which its state is copied, 0: before the first, snapshot to
        # write), during the forward
        self.state_begins = zeros(limits.max_rows, 2)
        self.state_saves = zeros(limits.num_checkpoints, 3)
        # [num_page_loads] (req_slot, first page index, count): pages that are loaded before the forward, not computed
        self.page_loads = zeros(limits.max_rows, 3)


class StepBuffers:
    """A ring of `RingEntry`. Two entries are enough at overlap depth one: schedule(n + 2) comes after commit(n), which
    comes after forward n has read its entry."""

    def __init__(self, limits: StepLimits, max_padded_rows: int | None = None, ring_len: int = 2) -> None:
        if ring_len < 2:
            raise ValueError(f"ring_len: {ring_len}: must be at least 2")
        padded = max(limits.max_rows, max_padded_rows or 0)
        self.limits = limits
        self.ring = tuple(RingEntry(limits, padded) for _ in range(ring_len))


# --------------------------------------------------------------------------------------------------------- output


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The results of one commit for the clients: first entries without a token, then one per live sampling row in row
    order (none for the row of a rejected draft; several for a request with accepted drafts), then the ends of rows that
    are not finite.

    All arrays have the same length. `tokens` is -1 for an end without a token. `rows` is the row in the committed step,
    which joins logprobs; it is -1 without a token, except for rows that are not finite.
    """

    step: int
    req_ids: Int64Array
    tokens: Int32Array
    reasons: Int32Array  # FinishReason
    rows: Int32Array

    def __len__(self) -> int:
        return len(self.req_ids)


def step_output(step: int, entries: Sequence[tuple[int, int, int, int]]) -> StepOutput:
    """Build a `StepOutput` from (req_id, token, reason, row) tuples."""
    table = np.array(entries, np.int64).reshape(len(entries), 4)
    narrow = table[:, 1:].astype(np.int32)
    return StepOutput(step, table[:, 0].copy(), narrow[:, 0].copy(), narrow[:, 1].copy(), narrow[:, 2].copy())
