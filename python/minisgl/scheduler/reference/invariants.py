"""Checks, from scratch, everything that must hold between two calls. A check changes nothing; a broken invariant is a
`ControlPlaneError` that names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from minisgl.scheduler.api import need
from minisgl.scheduler.parts import PrefixTree
from minisgl.scheduler.reference.admission import RATIO_MAX, RATIO_MIN
from minisgl.scheduler.reference.pins import Pins
from minisgl.scheduler.reference.radix import NO_CHECKPOINT
from minisgl.scheduler.reference.request import NO_SLOT, Request, RequestQueue, State
from minisgl.scheduler.reference.state import SchedulerState


def check_all(state: SchedulerState) -> None:
    """Raise `ControlPlaneError` at the first broken invariant. O(whole state)."""
    state.tree.check_integrity()
    check_page_owners(state.tree, state.started, state.num_pages)
    check_locks(state.tree, state.started, state.pins)
    _check_pins(state)
    _check_lists(state)
    _check_slots(state)
    _check_checkpoints(state)
    _check_pending(state)
    for request in state.started:
        _check_started(request, state.tree)
    need(RATIO_MIN <= state.ratio.value <= RATIO_MAX, f"the reserve ratio is {state.ratio.value}")


def check_page_owners(tree: PrefixTree, started: Iterable[Request], num_pages: int) -> None:
    """Check that each page has exactly one owner: the pool, the tree or a request."""
    owners = Counter(tree.free_pages())
    for _, _, _, pages, _ in tree.shape():
        owners.update(pages)
    for request in started:
        owners.update(request.pages[request.num_tree_pages :])
    twice = [page for page, count in owners.items() if count > 1]
    need(not twice, f"pages {twice[:8]} have more than one owner")
    lost = set(range(num_pages)) ^ set(owners)
    need(not lost, f"pages {sorted(lost)[:8]} have no owner, or don't exist")


def check_locks(tree: PrefixTree, started: Iterable[Request], pins: Pins) -> None:
    """Check that each node's lock count is the number of handles on it or below it, from started requests and pins."""
    locks: Counter[Any] = Counter()
    shape = {key: (parent, lock) for key, parent, lock, _, _ in tree.shape()}
    handles = [(request.req_id, request.handle) for request in started]
    handles += [(req_id, pin.handle) for req_id, pin in pins.items() if pin.handle is not None]
    for req_id, handle in handles:
        keys = [key for key, _ in tree.path_nodes(handle)]
        locks.update(keys)
        linked = all(shape[key][0] == parent for key, parent in pairwise(keys) if key in shape)
        need(linked and shape.keys() >= set(keys), f"request {req_id} locks a node that is not in the tree")
    for key, (_, lock) in shape.items():
        need(lock == locks[key], f"a node has {lock} locks and {locks[key]} handles")


def _check_pins(state: SchedulerState) -> None:
    """Check that pins stay within the limit, that a pin locks exactly the full pages of its prompt, and that a pin
    without a lock belongs to a live request."""
    limit, total = state.pins.max_pages, sum(pin.num_pages for _, pin in state.pins.items())
    need(total == state.pins.num_pages <= limit, f"{total} pages are pinned, counted {state.pins.num_pages} of {limit}")
    for req_id, pin in state.pins.items():
        need(pin.handle is not None or req_id in state.live, f"the pin of request {req_id} waits for nobody")
        if pin.handle is not None:
            pages = len(state.tree.path(pin.handle)[1])
            need(pages == pin.num_pages, f"request {req_id} pins {pages} pages, not {pin.num_pages}")


def _check_started(request: Request, tree: PrefixTree) -> None:
    """Check that a started request's page table is the path to its locked node plus own pages, exactly for its KV."""
    who = f"request {request.req_id}"
    size, length = tree.page_size, len(request.tokens) + request.num_pending
    drafted = len(request.drafter.in_flight) if request.drafter is not None else 0
    covered = request.kv_len + drafted
    need(len(request.pages) == -(-covered // size), f"{who}: {len(request.pages)} pages, {covered} KV")
    need(length + drafted <= request.max_len, f"{who}: {length} tokens and {drafted} drafted of {request.max_len}")
    tokens, pages = tree.path(request.handle)
    need(len(pages) == request.num_tree_pages, f"{who}: it locks {len(pages)} pages, not {request.num_tree_pages}")
    need(pages == request.pages[: len(pages)], f"{who}: its page table differs from the path that it locks")
    need(tokens == request.tokens[: len(tokens)], f"{who}: it locks other tokens than its own")
    need(length <= request.max_len, f"{who}: {length} tokens scheduled, the limit is {request.max_len}")
    if not request.is_prefilling:
        need(request.kv_len == length - 1, f"{who}: KV of {request.kv_len} tokens of {length}")


def _check_lists(state: SchedulerState) -> None:
    _check_queue(state.waiting, State.WAITING)
    _check_queue(state.started, State.STARTED)
    listed = [request.req_id for queue in (state.waiting, state.started) for request in queue]
    need(len(listed) == len(set(listed)), "a request is in two lists")
    need(set(listed) == set(state.live), "the lists and the live requests differ")
    for request in state.waiting:
        holds_something = request.handle is not None or request.pages or request.slot != NO_SLOT
        need(not holds_something, f"request {request.req_id} waits and holds something")


def _check_queue(queue: RequestQueue, state: State) -> None:
    items = queue.items
    need(all(a.order < b.order for a, b in pairwise(items)), f"{state.value} is not sorted")
    need(all(request.state is state for request in items), f"a request that is {state.value} has another state")


def _check_slots(state: SchedulerState) -> None:
    free, in_use, draining = state.slots.owners()
    need(sorted(free + in_use + draining) == list(range(state.slots.num_slots)), "a slot is lost or doubled")
    need(sorted(request.slot for request in state.started) == in_use, "slots in use and started requests differ")


def _check_checkpoints(state: SchedulerState) -> None:
    """Check that each checkpoint slot has one owner, and that exactly the pinned ones are exempt from eviction."""
    tree = state.tree
    if not tree.has_states:
        return
    of_nodes = [checkpoint for _, _, _, _, checkpoint in tree.shape() if checkpoint != NO_CHECKPOINT]
    tails = [request.tail for request in state.started if request.tail != NO_CHECKPOINT]
    owned = sorted([*tree.free_slots(), *of_nodes, *tails])
    need(owned == list(range(state.num_checkpoints)), "a slot of a checkpoint is lost or doubled")
    pinned = {tree.checkpoint(pin.saved) for _, pin in state.pins.items() if pin.saved is not None}
    need(set(tree.held_slots()) == pinned, "pins hold other checkpoints than they say")


def _check_pending(state: SchedulerState) -> None:
    """Check that a live request's pending tokens are its sampling rows in flight, that `last_step` covers every step in
    flight with a row of it, and that at most two steps are in flight."""
    pending: Counter[int] = Counter()
    for flight in state.in_flight:
        for request in flight.rows:
            need(request.last_step >= flight.step, f"request {request.req_id} has a row that it does not know of")
        pending.update(flight.rows[row].req_id for row in flight.sample_rows if row not in flight.drafts)
    for request in state.live.values():
        need(request.num_pending == pending[request.req_id], f"request {request.req_id}: wrong count of pending tokens")
    need(len(state.in_flight) <= 2, f"{len(state.in_flight)} steps are in flight")


class TableWatch:
    """Checks that page tables only grow from one check to the next until the request's end; drafts are exempt."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._seen: dict[tuple[int, int], list[int]] = {}

    def check(self, started: Iterable[Request]) -> None:
        tables = {
            (request.req_id, request.num_admissions): request.pages[: -(-request.kv_len // self._page_size)]
            for request in started
        }
        for key, pages in tables.items():
            before = self._seen.get(key, [])
            need(pages[: len(before)] == before, f"the page table of request {key[0]} changed")
        self._seen = tables
