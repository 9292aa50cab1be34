"""How much of a prompt a step takes in, and whether a waiting request may start.

Sizing changes nothing, so what fails leaves no trace; integers only, so that two implementations agree.

A request holds on admission only the pages of its first chunk. Whether it may start is decided by an estimate: its own
prompt and a share (the ratio) of the output it may still make, and the same for everyone started, must fit into what
is free or evictable. The ratio falls while that goes well and jumps after a retraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minisgl.scheduler.parts import Candidate, Handle, PlanChunks, PlannedChunk, PrefixMatch, PrefixTree
from minisgl.scheduler.reference.request import Request

MAX_OUTPUT_ESTIMATE = 4096  # tokens
RATIO_BITS = 10  # the ratio is in 1/1024
RATIO_START, RATIO_MIN, RATIO_MAX = 716, 102, 1024
RATIO_UP, RATIO_DOWN = 256, 1
NOTHING = (0, 0, False, 0, 0, 0)
LOADED_TOKENS = 256  # as many that are loaded count as one that is computed: small models copy no more in its time


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What a prefill row could get now: `match`, then `num_loads` pages that are loaded, then `num_tokens` computed,
    for which it takes `num_new_pages`; `cost` of the step's budget. With 0 tokens it gets nothing; `lacks_pages` says
    whether with more pages it would get more, `num_missing` how many pages the estimate lacks."""

    match: PrefixMatch
    num_tokens: int
    num_new_pages: int
    lacks_pages: bool
    num_covered: int  # pages that are cached without a state, and computed again, into nothing
    num_loads: int
    cost: int
    num_missing: int
    num_found: int  # pages that are cached, those of `match` and those that no checkpoint leads to
    begins_stored: bool  # with the state that is at hand behind the pages that are loaded

    @property
    def num_page_changes(self) -> int:
        return len(self.match.pages) + self.num_covered + self.num_loads + self.num_new_pages


@dataclass(slots=True)
class Room:
    """Room of a step for a row: tokens of the budget, page-table entries, and the `needed` pages that started requests
    will yet take, at the ratio in 1/1024."""

    budget: int
    max_page_changes: int
    reserve_ratio: int = RATIO_START
    needed: int = 0
    step: int = 0


def size_chunk(request: Request, tree: PrefixTree, room: Room, plan_chunks: PlanChunks) -> Chunk:
    """Size the next chunk of a request that prefills, or of a waiting one. Changes nothing.

    First the match goes on from the request's own node, but leaves at least one token to compute: a full hit stops
    at (length - 1) // page_size pages. Then `plan_chunks` decides.

    Of a model with states the match ends with a checkpoint. Tokens behind it whose pages are cached are computed for
    the state alone: the row has those pages, and writes nothing to them. Where a state is at hand that is behind more
    tokens, the row begins with that: its match ends there at most, whatever has a checkpoint, and all pages between are
    loaded at once.
    """
    length = request.prefill_len if request.handle is not None else len(request.tokens)
    match, num_unlocked, num_found, num_loadable, has_state = _find(request, length, tree, room.step)
    counts = len(request.pages), len(match.pages), num_unlocked, num_found, num_loadable
    (planned,) = plan_chunks(
        [(length, *counts, has_state, request.num_unscheduled)],
        budget=room.budget,
        available=tree.num_available,
        page_size=tree.page_size,
        max_page_changes=room.max_page_changes,
        reserve_ratio=room.reserve_ratio,
        needed=room.needed,
    )
    return Chunk(match, *planned, num_found, has_state)


def prefill_admission_plan(
    candidates: Sequence[Candidate],
    *,
    budget: int,
    available: int,
    page_size: int = 1,
    max_page_changes: int = 65_536,
    reserve_ratio: int = RATIO_START,
    needed: int = 0,
) -> list[PlannedChunk]:
    """See `PlanChunks`. Between two candidates the room shrinks by what the first gets, as if nothing but what is
    matched were shared. The estimate of a candidate is the rest of its prompt, its reserve, and the `needed` pages of
    the started requests."""
    plan: list[PlannedChunk] = []
    for row in candidates:
        length, num_pages, num_matched, num_unlocked, _, num_loadable, _, num_unscheduled = row
        chunk = NOTHING  # where another one took what it matched
        if available >= num_unlocked + num_loadable:
            chunk = _plan_chunk(row, budget, available, page_size, max_page_changes)
        num_tokens, num_new_pages, _, num_covered, num_loads, cost = chunk
        rest = -(-length // page_size) - num_matched
        reserve = _reserve(num_unscheduled, reserve_ratio, page_size)
        missing = max(0, rest + reserve + needed - max(0, available - num_unlocked))
        plan.append((*chunk, missing))
        if not num_tokens or missing:
            break
        taken = num_covered + num_loads + num_new_pages
        ends = (num_pages + num_matched + num_loads) * page_size + num_tokens == length
        budget -= cost
        available -= num_unlocked + num_loads + num_new_pages
        max_page_changes -= num_matched + taken
        needed += rest - taken + _reserve(max(0, num_unscheduled - ends), reserve_ratio, page_size)
    return plan


def _plan_chunk(
    row: Candidate, budget: int, available: int, size: int, max_page_changes: int
) -> tuple[int, int, bool, int, int, int]:
    """A `PlannedChunk` without what the estimate lacks: min(`budget`, what is left) tokens, cut to a page border unless
    that reaches the end, shrunk to the pages that are free or evictable (those matched are about to be protected).
    Nothing, if the page-table entries exceed `max_page_changes`.

    Before them come pages that can be loaded, as many as the budget allows (see `LOADED_TOKENS`), if they leave a page
    to compute in. Where it allows fewer than there are, a page is computed, and the next chunk loads more.
    """
    length, num_pages, num_matched, num_unlocked, num_found, num_loadable, has_state, _ = row
    available -= num_unlocked
    num_loads = num_loadable if has_state else min(num_loadable, max(budget, 0) * LOADED_TOKENS // size)
    remaining = length - (num_pages + num_matched + num_loads) * size
    num_tokens = min(budget, remaining if num_loads == num_loadable else size)
    if num_tokens < remaining:
        num_tokens -= num_tokens % size
    if num_tokens <= 0:
        return NOTHING
    available -= num_loads
    num_covered = min(num_found - num_matched, num_tokens // size)
    num_new_pages = -(-num_tokens // size) - num_covered
    lacks_pages = num_new_pages > available
    if lacks_pages:
        num_new_pages, num_tokens = available, (num_covered + available) * size
    if num_matched + num_covered + num_loads + num_new_pages > max_page_changes:
        return NOTHING
    cost = num_tokens + num_loads * size // LOADED_TOKENS
    return num_tokens, num_new_pages, lacks_pages, num_covered, num_loads, cost


def cached_len(request: Request, tree: PrefixTree, step: int) -> int:
    """Tokens of a waiting request that `step` need not compute: they are cached, or at hand."""
    match, _, _, num_loadable, _ = _find(request, len(request.tokens), tree, step)
    return (len(match.pages) + num_loadable) * tree.page_size


def _find(request: Request, length: int, tree: PrefixTree, step: int) -> tuple[PrefixMatch, int, int, int, bool]:
    """The cached part of the first `length` tokens of a request, for a row of `step`: the match, how many cached pages
    are not locked, how many there are, how many can be loaded behind the match, and whether the row then begins with
    the state that is at hand."""
    num_pages = len(request.pages)
    max_match = (length - 1) // tree.page_size if request.uses_cache else 0
    start = tree.root if request.handle is None else request.handle
    match = tree.match(start, request.tokens, num_pages, max_match, request.namespace)
    num_found, num_unlocked = len(match.pages), match.num_unlocked
    available = tree.num_available - num_unlocked
    first, end = request.stored
    if not tree.has_states:
        count = min(end, max_match) - num_pages - num_found if first <= num_pages + num_found else 0
        return match, num_unlocked, num_found, count if 0 < count < available else 0, False
    saved = tree.beginning(start, match, step)
    if num_pages + len(saved.pages) < end <= max_match and first <= num_pages + num_found:
        before = tree.match(start, request.tokens, num_pages, end, request.namespace)
        count = end - num_pages - len(before.pages)
        if count < available:
            return before, num_unlocked, num_found, count, True
    return saved, num_unlocked, num_found, 0, False


Saves = list[tuple[int, int]]
"""Tokens into the row, and the slot to which its state goes when it has passed them."""


def apply_chunk(request: Request, chunk: Chunk, tree: PrefixTree) -> tuple[Handle, int]:
    """Lock what was matched, take the pages, and let the full ones enter the tree, locked by the request.

    They enter before they are computed or loaded. That is sound because forwards run in order and a forward stores the
    KV of all its rows, layer by layer, before any row attends. A page that the tree has already (a full hit stopped
    before it) stays with the request, as does a partial one.

    Returns where the chunk begins: the node that ends there, and the pages before.
    """
    size = tree.page_size
    handle = tree.root if request.handle is None else request.handle
    if request.uses_cache:
        handle = tree.descend(handle, chunk.match)
    request.pages += chunk.match.pages
    first, begin = len(request.pages), handle
    request.kv_len = (first + chunk.num_loads) * size + chunk.num_tokens
    if chunk.num_covered:
        covered = tree.match(handle, request.tokens, first, first + chunk.num_covered, request.namespace)
        handle = tree.descend(handle, covered)
        request.pages += covered.pages
    at = len(request.pages)
    request.pages += tree.take(chunk.num_loads + chunk.num_new_pages)
    if request.uses_cache:
        request.num_tree_pages = at
        full = request.kv_len // size
        if full > at and not tree.has_page(handle, request.tokens, at, request.namespace):
            pages = request.pages[at:full]
            handle = tree.append(handle, request.tokens[at * size : full * size], pages, request.namespace)
            request.num_tree_pages = full
    request.handle = handle
    return begin, first


def save_states(
    request: Request, chunk: Chunk, tree: PrefixTree, begin: tuple[Handle, int], interval: int, step: int
) -> Saves:
    """What the row of an applied chunk saves on its way: the state at each border of `_borders`, if there is a slot.
    Slots come from other nodes, which may go for them: what is to stay is locked before."""
    node, first = begin
    saves: Saves = []
    computed = first + chunk.num_loads
    for border in _borders(request, chunk, computed, tree, interval):
        slot = tree.save(tree.match(node, request.tokens, first, border, request.namespace), step)
        if slot is not None:
            saves.append(((border - computed) * tree.page_size, slot))
    return saves


def _borders(request: Request, chunk: Chunk, first: int, tree: PrefixTree, interval: int) -> list[int]:
    """After which pages of its text a chunk that computes from page `first` on saves its state: every `interval`
    tokens, the last from which the whole text can be found, and where the text leaves another one's that has no
    checkpoint. One that begins with what was at hand saves that, too."""
    if not tree.has_states or not request.uses_cache:
        return []
    size, step = tree.page_size, interval // tree.page_size
    last = request.num_tree_pages  # what the request does not lock may be gone before it is saved
    found = {(request.prefill_len - 1) // size}
    found.update(range(first // step * step + step, last + 1, step))
    if chunk.num_found > len(chunk.match.pages):
        found.add(first - len(chunk.match.pages) + chunk.num_found)
    own = {first} if chunk.begins_stored else set[int]()
    return sorted(own | {border for border in found if first < border <= last})


class ReserveRatio:
    """Which share of the output they may still make requests are expected to make, in 1/1024."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = RATIO_START

    def after_step(self, num_retracted: int) -> None:
        """Once at the end of every step's pass, one without rows too."""
        if num_retracted:
            self.value = min(self.value + RATIO_UP, RATIO_MAX)
        else:
            self.value = max(self.value - RATIO_DOWN, RATIO_MIN)

    def reserve_pages(self, request: Request, page_size: int) -> int:
        """Pages set aside for its output, rounded up."""
        return _reserve(request.num_unscheduled, self.value, page_size)


def _reserve(num_unscheduled: int, ratio: int, page_size: int) -> int:
    output = min(num_unscheduled, MAX_OUTPUT_ESTIMATE) * ratio >> RATIO_BITS
    return -(-output // page_size)


def needed_pages(started: Iterable[Request], ratio: ReserveRatio, page_size: int) -> int:
    """Estimated pages that started requests will yet take: the rest of their prompts and their reserves."""
    total = 0
    for request in started:
        prompt_pages = -(-request.prefill_len // page_size)
        total += max(0, prompt_pages - len(request.pages)) + ratio.reserve_pages(request, page_size)
    return total


def steps_until_room(missing: int, started: Iterable[Request], ratio: ReserveRatio, page_size: int) -> int:
    """After how many steps so many pages have come back, with what was set aside, if all end by their limits alone."""
    for request in sorted(started, key=lambda one: one.num_unscheduled):
        missing -= len(request.pages) + needed_pages((request,), ratio, page_size)
        if missing <= 0:
            return request.num_unscheduled
    return 0
