"""A request as the scheduler sees it, and the sorted queue of requests.

Invariants: a request keeps its object for life (ids are never reused); its order key never changes. A started request
is *prefilling* until the KV of all tokens known at its admission is scheduled, then it *decodes*. Tokens that a
retracted request has generated count as prompt when it is admitted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from minisgl.scheduler.api import AGE, ControlPlaneError
from minisgl.scheduler.parts import Handle
from minisgl.scheduler.reference.drafter import Drafter, make_drafter
from minisgl.scheduler.reference.radix import NO_CHECKPOINT
from minisgl.step import Arrival, FinishReason

OrderKey = tuple[bool, int, int]  # (low priority, age, id)
NO_SLOT = -1
NO_STEP = -1


class State(Enum):
    WAITING = "waiting"
    STARTED = "started"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. `tokens` are the committed ones, prompt first; `num_pending` more are scheduled to be
    sampled. The last group of fields is valid only while the request is started."""

    req_id: int
    order: OrderKey
    priority: int
    tokens: list[int]
    num_prompt: int
    max_len: int  # total length at which it ends: min(num_prompt + max_tokens, StepLimits.max_seq_len)
    stop_ids: frozenset[int]  # includes the model's EOS ids, unless ignored
    min_len: int  # total length before which no stop id ends it
    no_overlap: bool
    uses_cache: bool  # match prefixes, and share prompt pages as soon as they are scheduled
    namespace: int  # cache namespace
    drafter: Drafter | None = None  # None: no drafts
    stored: tuple[int, int] = (0, 0)  # range of its pages that can be loaded
    state: State = State.WAITING
    cached_len: int = 0  # tokens that need no computing, at the last lookup
    matched_in: int = NO_STEP  # step of that lookup
    num_admissions: int = 0
    num_found_pages: int | None = None  # pages cached at its first admission since the tree was last emptied
    num_pending: int = 0
    last_step: int = NO_STEP  # the last step that holds a row of it

    slot: int = NO_SLOT
    handle: Handle | None = None  # the node of the tree that it locks
    pages: list[int] = field(default_factory=list)  # its page table, by column
    num_tree_pages: int = 0  # leading pages that belong to the tree; the others (the tail) are the request's own
    kv_len: int = 0  # tokens whose KV is computed or scheduled, without draft tokens
    prefill_len: int = 0  # tokens known at this admission
    tail: int = NO_CHECKPOINT  # own checkpoint slot, which enters the tree with its pages
    tail_len: int = 0  # tokens before that checkpoint
    tail_step: int = NO_STEP  # step that saves it

    @property
    def is_background(self) -> bool:
        return self.order[0]

    @property
    def age(self) -> int:
        return self.order[1]

    @property
    def is_prefilling(self) -> bool:
        return self.kv_len < self.prefill_len

    @property
    def awaits_token(self) -> bool:
        """Whether a row may be scheduled only when no token of the request is in flight: it asks for that, or it has a
        draft that must follow, or verify with, the token in flight."""
        drafter = self.drafter
        return self.no_overlap or (drafter is not None and (len(drafter.draft) > 1 or bool(drafter.in_flight)))

    @property
    def num_unscheduled(self) -> int:
        """Tokens that may still be generated beyond the known and the pending ones."""
        return self.max_len - len(self.tokens) - self.num_pending

    def accept(self, token: int) -> FinishReason:
        """Append a sampled token. Returns why it ends the request, or `NONE`; stop wins over length."""
        self.tokens.append(token)
        length = len(self.tokens)
        if token in self.stop_ids and length >= self.min_len:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_len else FinishReason.NONE


def make_request(
    arrival: Arrival, count: int, max_seq_len: int, eos_ids: tuple[int, ...], caches: bool, max_draft_len: int = 0
) -> Request:
    """Create the request for a valid `arrival`. `count` is the number of earlier arrivals of its kind: low-priority
    ones are counted separately, and have no drafts. `caches` is false if the cache is "naive".

    Each arrival gets a higher age than the ones before it, so a request of priority p is overtaken by at most (p - q) *
    AGE later ones of priority q, however many arrive.
    """
    drafts = max_draft_len > 0 and not (arrival.no_drafts or arrival.background)
    return Request(
        req_id=int(arrival.req_id),
        order=(bool(arrival.background), arrival.priority * AGE + count, int(arrival.req_id)),
        priority=arrival.priority,
        tokens=arrival.tokens.tolist(),
        num_prompt=arrival.num_prompt,
        max_len=min(arrival.num_prompt + arrival.max_tokens, max_seq_len),
        stop_ids=frozenset(arrival.stop_ids).union(() if arrival.ignore_eos else eos_ids),
        min_len=arrival.num_prompt + arrival.min_tokens,
        no_overlap=arrival.no_overlap,
        uses_cache=caches and not arrival.no_match,
        namespace=arrival.namespace,
        drafter=make_drafter(max_draft_len) if drafts else None,
        stored=(arrival.stored_from, arrival.stored_to),
    )


def _order(request: Request) -> OrderKey:
    return request.order


class RequestQueue:
    """A queue of requests, sorted by (low priority, age, id)."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Request] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.items)

    @property
    def num_ordinary(self) -> int:
        """Number of requests that are not low-priority; those come first."""
        return bisect_left(self.items, True, key=lambda request: request.is_background)

    @property
    def first(self) -> Request:
        return self.items[0]

    @property
    def last(self) -> Request:
        return self.items[-1]

    def add(self, request: Request) -> None:
        insort(self.items, request, key=_order)

    def remove(self, request: Request) -> None:
        at = bisect_left(self.items, request.order, key=_order)
        if at == len(self.items) or self.items[at] is not request:
            raise ControlPlaneError(f"request {request.req_id} is not in the list that its state names")
        del self.items[at]

    def clear(self) -> None:
        self.items.clear()
