"""Ways to break the reference scheduler on purpose. Each is a function that patches it; the fuzzer must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minisgl.scheduler import inputs
from minisgl.scheduler.reference import admission, decode_set, drafts, retraction, scheduler
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.pins import Pins
from minisgl.scheduler.reference.radix import tree as radix_tree
from minisgl.scheduler.reference.radix.nodes import page_key
from minisgl.scheduler.reference.radix.tree import Match, Node, RadixTree
from minisgl.scheduler.reference.request import Request, State
from minisgl.scheduler.reference.slots import SlotTable
from minisgl.scheduler.reference.state import InFlight
from minisgl.step import FinishReason, StepOutput, step_output

Patch = pytest.MonkeyPatch


def publish_a_page_too_many(patch: Patch) -> None:
    """At an end, the page whose last token was sampled but never computed enters the cache."""
    original = retraction.give_up_pages

    def give_up_pages(request: Request, tree: RadixTree) -> None:
        rounded = -(-request.kv_len // tree.page_size) * tree.page_size
        if rounded <= min(len(request.tokens), len(request.pages) * tree.page_size):
            request.kv_len = rounded
        original(request, tree)

    patch.setattr(retraction, "give_up_pages", give_up_pages)


def hang_under_the_wrong_parent(patch: Patch) -> None:
    original = RadixTree.append

    def append(self: RadixTree, handle: Node, tokens: list[int], pages: list[int], namespace: int = 0) -> Node:
        parent, key = handle.parent, page_key(namespace, tokens[: self.page_size])
        if parent is not None and key not in parent.children:
            child = original(self, handle, tokens, pages, namespace)
            del handle.children[key]
            parent.children[key] = child
            return child
        return original(self, handle, tokens, pages, namespace)

    patch.setattr(RadixTree, "append", append)


def share_prefixes_of_all_namespaces(patch: Patch) -> None:
    patch.setattr(radix_tree, "page_key", lambda namespace, tokens: tuple(tokens))


def skip_the_lock_of_a_match(patch: Patch) -> None:
    def descend(self: RadixTree, handle: Node, match: Match) -> Node:
        return match.node if match.partial is None else self._split(match.partial, match.num_partial_pages)

    patch.setattr(RadixTree, "descend", descend)


def unlock_twice(patch: Patch) -> None:
    original = RadixTree.release

    def release(self: RadixTree, handle: Node) -> None:
        original(self, handle)
        original(self, handle)

    patch.setattr(RadixTree, "release", release)


def keep_the_lock(patch: Patch) -> None:
    patch.setattr(RadixTree, "release", lambda self, handle: None)


def evict_locked_leaves(patch: Patch) -> None:
    patch.setattr(Node, "is_evictable_leaf", property(lambda self: not self.children and self.parent is not None))


def lose_a_freed_page(patch: Patch) -> None:
    original = PagePool.push

    def push(self: PagePool, pages: Any) -> None:
        pages = list(pages)
        original(self, pages[1:] if len(pages) > 1 else pages)

    patch.setattr(PagePool, "push", push)


def free_pages_that_the_tree_took(patch: Patch) -> None:
    original = RadixTree.insert

    def insert(self: RadixTree, handle: Node, tokens: list[int], pages: list[int], *where: int) -> tuple[Node, int]:
        node, had = original(self, handle, tokens, pages, *where)
        return node, min(had + 1, len(pages))

    patch.setattr(RadixTree, "insert", insert)


def match_by_the_first_page_only(patch: Patch) -> None:
    def common(self: RadixTree, child: Node, tokens: list[int], at: int, max_pages: int) -> int:
        return min(len(child.pages), max_pages - at)

    patch.setattr(RadixTree, "_num_common_pages", common)


def full_hit_computes_nothing(patch: Patch) -> None:
    original = RadixTree.match

    def match(self: RadixTree, node: Node, tokens: list[int], first_page: int, _: int, namespace: int = 0) -> Match:
        return original(self, node, tokens, first_page, len(tokens) // self.page_size, namespace)

    patch.setattr(RadixTree, "match", match)


def out_loc_off_by_one(patch: Patch) -> None:
    original = scheduler.write_step

    def write_step(decided: Any, entry: Any, *rest: Any) -> Any:
        plan = original(decided, entry, *rest)
        if plan.num_tokens:
            entry.out_loc[plan.num_tokens - 1] = max(0, entry.out_loc[plan.num_tokens - 1] - 1)
        return plan

    patch.setattr(scheduler, "write_step", write_step)


def lose_a_page_table_change(patch: Patch) -> None:
    original = scheduler.write_step

    def write_step(decided: Any, entry: Any, *rest: Any) -> Any:
        plan = original(decided, entry, *rest)
        plan.num_page_table_updates = max(0, plan.num_page_table_updates - 1)
        return plan

    patch.setattr(scheduler, "write_step", write_step)


def placeholder_of_another_slot(patch: Patch) -> None:
    original = decode_set.input_token

    def input_token(request: Request) -> int:
        token = original(request)
        return token if token >= 0 else -max(1, request.slot)

    patch.setattr(decode_set, "input_token", input_token)


def free_a_slot_in_flight(patch: Patch) -> None:
    original = SlotTable.free
    patch.setattr(SlotTable, "free", lambda self, slot, last_step: original(self, slot, None))


def deliver_the_drained_token(patch: Patch) -> None:
    original = scheduler.ReferenceControlPlane.commit

    def commit(self: Any, step: int, tokens: Any) -> StepOutput:
        done = self.state.in_flight[0]
        ended = [row for row in done.sample_rows if done.rows[row].state is State.ENDED]
        output = original(self, step, tokens)
        extra = [(done.rows[row].req_id, int(tokens[row]), FinishReason.NONE, row) for row in ended]
        columns = (output.req_ids, output.tokens, output.reasons, output.rows)
        entries = list(zip(*(column.tolist() for column in columns), strict=True))
        return step_output(step, entries + extra)

    patch.setattr(scheduler.ReferenceControlPlane, "commit", commit)


def lose_the_token_of_a_retracted_row(patch: Patch) -> None:
    original = Request.accept

    def accept(self: Request, token: int) -> FinishReason:
        return FinishReason.NONE if self.state is State.WAITING else original(self, token)

    patch.setattr(Request, "accept", accept)


def schedule_past_the_limit(patch: Patch) -> None:
    def is_eligible(request: Request) -> bool:
        return request.kv_len >= request.prefill_len and not (request.num_pending and request.awaits_token)

    patch.setattr(decode_set, "is_eligible", is_eligible)


def retract_rows_of_the_plan(patch: Patch) -> None:
    patch.setattr(retraction, "pick_victim", lambda started, for_request: started.first)


def admit_on_top_of_the_pool(patch: Patch) -> None:
    """Pages that were matched count as still evictable."""
    original = admission.size_chunk

    def size_chunk(request: Request, tree: RadixTree, *rest: Any) -> admission.Chunk:
        real = tree.match

        def match(*args: Any) -> Match:
            found = real(*args)
            return Match(found.node, found.partial, found.num_partial_pages, found.pages, 0)

        tree.match = match  # type: ignore[method-assign]
        try:
            return original(request, tree, *rest)  # type: ignore[arg-type]
        finally:
            del tree.match  # type: ignore[method-assign]

    patch.setattr(admission, "size_chunk", size_chunk)


def pin_without_a_lock(patch: Patch) -> None:
    original = Pins.take

    def take(self: Pins, request: Request, tree: RadixTree) -> None:
        had = self.holds(request.req_id)
        original(self, request, tree)
        if self.holds(request.req_id) and not had:
            handle = dict(self.items())[request.req_id].handle
            assert handle is not None
            tree.release(handle)

    patch.setattr(Pins, "take", take)


def keep_a_pin_after_an_abort(patch: Patch) -> None:
    original = scheduler.ReferenceControlPlane._end

    def end(self: Any, request: Request, reason: FinishReason) -> None:
        original(self, request, FinishReason.STOP if reason is FinishReason.ABORT else reason)

    patch.setattr(scheduler.ReferenceControlPlane, "_end", end)


def drop_a_pin_at_the_end(patch: Patch) -> None:
    patch.setattr(Pins, "holds", lambda self, req_id: False)


def keep_pins_over_a_failed_forward(patch: Patch) -> None:
    patch.setattr(Pins, "forget", lambda self, live: None)


def pin_beyond_the_limit(patch: Patch) -> None:
    patch.setattr(inputs, "_check_pin", lambda *args: None)


def drop_what_others_hold(patch: Patch) -> None:
    def drop(self: RadixTree, node: Node, depth: int, keep: int) -> None:
        if depth > keep and node.parent is not None and not node.children:
            self._trim(node, min(depth - keep, len(node.pages)))

    patch.setattr(RadixTree, "drop", drop)


def lose_a_page_in_the_background(patch: Patch) -> None:
    """One in the background gives up its place, not its pages."""
    original = retraction.give_up_pages

    def give_up_pages(request: Request, tree: RadixTree) -> None:
        if request.is_background and request.state is State.STARTED and tree.num_available == 0:
            retraction.forget_pages(request)
        else:
            original(request, tree)

    patch.setattr(retraction, "give_up_pages", give_up_pages)


def believe_every_draft(patch: Patch) -> None:
    patch.setattr(InFlight, "counts", lambda self, row: True)


def believe_a_draft_after_a_refused_one(patch: Patch) -> None:
    """A row's token counts if its input is what the text ends with, wherever that is."""

    def counts(self: InFlight, row: int) -> bool:
        return row not in self.drafts or self.rows[row].tokens[-1] == self.drafts[row][1]

    patch.setattr(InFlight, "counts", counts)


def keep_the_pages_of_a_refused_draft(patch: Patch) -> None:
    def settle(request: Request, tree: RadixTree) -> None:
        drafter = request.drafter
        assert drafter is not None
        request.kv_len = len(request.tokens) - 1
        drafter.in_flight = []

    patch.setattr(drafts, "settle", settle)


def take_a_refused_token_for_computed(patch: Patch) -> None:
    """The KV behind the text, which a refused draft left there, counts as that of the next token."""
    original = drafts.settle

    def settle(request: Request, tree: RadixTree) -> None:
        drafted = request.drafter is not None and len(request.drafter.in_flight)
        refused = drafted > len(request.tokens) - 1 - request.kv_len
        original(request, tree)
        request.kv_len += refused and request.kv_len % tree.page_size > 0

    patch.setattr(drafts, "settle", settle)


def go_on_before_a_draft_is_committed(patch: Patch) -> None:
    def awaits_token(self: Request) -> bool:
        return self.no_overlap or (self.drafter is not None and len(self.drafter.draft) > 1)

    patch.setattr(Request, "awaits_token", property(awaits_token))


def draft_past_the_limit(patch: Patch) -> None:
    def draft_len(request: Request) -> int:
        return len(request.drafter.draft) if request.drafter is not None and request.num_pending == 1 else 0

    patch.setattr(drafts, "draft_len", draft_len)


def draft_with_pages_of_others(patch: Patch) -> None:
    """However few pages there are."""
    patch.setattr(scheduler.StepPass, "_draft_with_pages", lambda self, request, decided, count: count)


def begin_with_a_state_of_fewer_tokens(patch: Patch) -> None:
    """Of those whose pages the tree has, all count, not only those before the state that is at hand."""
    original = admission._find

    def find(request: Request, length: int, tree: RadixTree, step: int) -> Any:
        found = original(request, length, tree, step)
        _, _, num_found, _, has_state = found
        if not has_state:
            return found
        at, start = len(request.pages), request.handle or tree.root
        match = tree.match(start, request.tokens, at, at + num_found, request.namespace)
        return match, *found[1:]

    patch.setattr(admission, "_find", find)


def save_what_was_at_hand_behind_the_wrong_page(patch: Patch) -> None:
    original = admission.save_states

    def save_states(*args: Any) -> admission.Saves:
        saves = original(*args)
        return [(tokens or args[2].page_size, slot) for tokens, slot in saves]

    patch.setattr(admission, "save_states", save_states)


STATE_MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    begin_with_a_state_of_fewer_tokens,
    save_what_was_at_hand_behind_the_wrong_page,
)
MUTATIONS: tuple[Callable[[Patch], None], ...] = (
    publish_a_page_too_many,
    hang_under_the_wrong_parent,
    share_prefixes_of_all_namespaces,
    skip_the_lock_of_a_match,
    unlock_twice,
    keep_the_lock,
    evict_locked_leaves,
    lose_a_freed_page,
    free_pages_that_the_tree_took,
    match_by_the_first_page_only,
    full_hit_computes_nothing,
    out_loc_off_by_one,
    lose_a_page_table_change,
    placeholder_of_another_slot,
    free_a_slot_in_flight,
    deliver_the_drained_token,
    lose_the_token_of_a_retracted_row,
    schedule_past_the_limit,
    retract_rows_of_the_plan,
    admit_on_top_of_the_pool,
    pin_without_a_lock,
    keep_a_pin_after_an_abort,
    drop_a_pin_at_the_end,
    keep_pins_over_a_failed_forward,
    pin_beyond_the_limit,
    drop_what_others_hold,
    lose_a_page_in_the_background,
    believe_every_draft,
    believe_a_draft_after_a_refused_one,
    keep_the_pages_of_a_refused_draft,
    take_a_refused_token_for_computed,
    go_on_before_a_draft_is_committed,
    draft_past_the_limit,
    draft_with_pages_of_others,
)
