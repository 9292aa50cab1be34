"""Sizes of prefill chunks, and admission of waiting requests. Sizing changes nothing, so an admission that fails has no
effect; arithmetic is on integers only, so that two implementations agree.

An admitted request gets the pages of its first chunk only. Whether it may start is decided by an estimate: the rest of
its prompt and a fraction (the reserve ratio) of the output it may still generate, and the same for every started
request, must fit into the free and evictable pages. The ratio falls slowly and rises after each retraction.
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
LOADED_TOKENS = 256  # loaded tokens that cost as much budget as one computed token (the copies of a small model)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The prefill chunk that a request could get in a step: first the cached pages of `match`, then `num_loads` pages
    to load, then `num_tokens` tokens to compute, which need `num_new_pages` pages and `cost` tokens of the budget.
    `num_tokens` is 0 if the request gets nothing. `lacks_pages`: more pages would give more tokens. `num_missing`:
    pages that the estimate lacks."""

    match: PrefixMatch
    num_tokens: int
    num_new_pages: int
    lacks_pages: bool
    num_covered: int  # cached pages that are recomputed for the state, without writing KV
    num_loads: int
    cost: int
    num_missing: int
    num_found: int  # cached pages: those of `match`, and those after its last checkpoint
    begins_stored: bool  # the row begins with the stored state after the loaded pages

    @property
    def num_page_changes(self) -> int:
        return len(self.match.pages) + self.num_covered + self.num_loads + self.num_new_pages


@dataclass(slots=True)
class ChunkLimits:
    """Limits for one row's chunk: the token budget, page-table entries, and the `needed` pages that started requests
    will still allocate, at a reserve ratio in 1/1024."""

    budget: int
    max_page_changes: int
    reserve_ratio: int = RATIO_START
    needed: int = 0
    step: int = 0


def size_chunk(request: Request, tree: PrefixTree, room: ChunkLimits, plan_chunks: PlanChunks) -> Chunk:
    """Return the next chunk of a prefilling or waiting request. Changes nothing.

    The match continues from the request's own node and leaves at least one token to compute: a full hit stops at
    (length - 1) // page_size pages. Then `plan_chunks` decides.

    With recurrent layers the match ends at a state checkpoint. Later tokens whose pages are cached are recomputed only
    for the state: the row uses those pages and writes nothing to them. If a stored state is available further on, the
    row begins with that state, and all pages before it that are not cached are loaded at once.
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
    """Implementation of `PlanChunks` in Python. Each candidate's chunk reduces the budget and the pages for the next
    one, as if only matched pages were shared. The estimate of a candidate is the rest of its prompt, its reserve, and
    the `needed` pages of the started requests."""
    plan: list[PlannedChunk] = []
    for row in candidates:
        length, num_pages, num_matched, num_unlocked, _, num_loadable, _, num_unscheduled = row
        chunk = NOTHING  # an earlier candidate took the pages that it matched
        if available >= num_unlocked + num_loadable:
            chunk = _plan_chunk(row, budget, available, page_size, max_page_changes)
        num_tokens, num_new_pages, _, num_covered, num_loads, cost = chunk
        rest = -(-length // page_size) - num_matched
        reserve = _reserve(num_unscheduled, reserve_ratio, page_size)
        missing = max(0, rest + reserve + needed - max(0, available - num_unlocked))
        plan.append((*chunk, missing))
        if not num_tokens or missing:
            break
        num_allocated = num_covered + num_loads + num_new_pages
        ends = (num_pages + num_matched + num_loads) * page_size + num_tokens == length
        budget -= cost
        available -= num_unlocked + num_loads + num_new_pages
        max_page_changes -= num_matched + num_allocated
        needed += rest - num_allocated + _reserve(max(0, num_unscheduled - ends), reserve_ratio, page_size)
    return plan


def _plan_chunk(
    row: Candidate, budget: int, available: int, size: int, max_page_changes: int
) -> tuple[int, int, bool, int, int, int]:
    """Return a `PlannedChunk` without its last field: min(`budget`, remaining) tokens, rounded down to a page boundary
    unless they reach the end, and reduced to the pages that are free or evictable (not counting matched ones, which
    will be locked). All 0 if the page-table entries exceed `max_page_changes`.

    Loadable pages come first, as many as the budget allows (see `LOADED_TOKENS`), if a page is left to compute in. If
    it allows only some of them, one page is computed, and the next chunk loads more.
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
    """Return how many tokens of a waiting request `step` need not compute, because they are cached or can be loaded."""
    match, _, _, num_loadable, _ = _find(request, len(request.tokens), tree, step)
    return (len(match.pages) + num_loadable) * tree.page_size


def _find(request: Request, length: int, tree: PrefixTree, step: int) -> tuple[PrefixMatch, int, int, int, bool]:
    """Find the cached part of the first `length` tokens of a request, for a row of `step`. Returns the match, the
    number of its unlocked pages, the number of cached pages, the number of pages that can be loaded after the match,
    and whether the row then begins with a stored state."""
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
"""State saves of a row: after how many of its tokens, and to which checkpoint slot."""


def apply_chunk(request: Request, chunk: Chunk, tree: PrefixTree) -> tuple[Handle, int]:
    """Lock the matched pages, allocate the others, and insert the full ones into the tree, locked by the request.

    They are inserted before they are computed or loaded. That is sound because forwards run in order, and a forward
    stores the KV of all its rows, layer by layer, before any row attends. A page that the tree already has (a full hit
    stopped before it) and a partial page stay with the request.

    Returns where the chunk begins: the node that ends there, and the number of pages before it.
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
    """Allocate a checkpoint slot for each boundary of `_borders` and return the saves of the row. A boundary without a
    slot is skipped. Slots may be taken from other nodes, which may be removed for it: lock what must stay."""
    node, first = begin
    saves: Saves = []
    computed = first + chunk.num_loads
    for border in _borders(request, chunk, computed, tree, interval):
        slot = tree.save(tree.match(node, request.tokens, first, border, request.namespace), step)
        if slot is not None:
            saves.append(((border - computed) * tree.page_size, slot))
    return saves


def _borders(request: Request, chunk: Chunk, first: int, tree: PrefixTree, interval: int) -> list[int]:
    """Return the page counts after which a chunk that computes from page `first` saves its state: every `interval`
    tokens, at the last boundary from which the whole sequence can be matched, where the sequence leaves cached pages
    that have no checkpoint, and at `first` if the chunk began with a stored state."""
    if not tree.has_states or not request.uses_cache:
        return []
    size, step = tree.page_size, interval // tree.page_size
    last = request.num_tree_pages  # unlocked pages may be evicted before the save
    borders = {(request.prefill_len - 1) // size}
    borders.update(range(first // step * step + step, last + 1, step))
    if chunk.num_found > len(chunk.match.pages):
        borders.add(first - len(chunk.match.pages) + chunk.num_found)
    own = {first} if chunk.begins_stored else set[int]()
    return sorted(own | {border for border in borders if first < border <= last})


class ReserveRatio:
    """Fraction, in 1/1024, of their remaining output that requests are expected to generate."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = RATIO_START

    def after_step(self, num_retracted: int) -> None:
        """Adjust the ratio at the end of every step, even one without rows: raise it if requests were retracted, else
        lower it a little."""
        if num_retracted:
            self.value = min(self.value + RATIO_UP, RATIO_MAX)
        else:
            self.value = max(self.value - RATIO_DOWN, RATIO_MIN)

    def reserve_pages(self, request: Request, page_size: int) -> int:
        """Return the pages to reserve for the output of `request`, rounded up."""
        return _reserve(request.num_unscheduled, self.value, page_size)


def _reserve(num_unscheduled: int, ratio: int, page_size: int) -> int:
    output = min(num_unscheduled, MAX_OUTPUT_ESTIMATE) * ratio >> RATIO_BITS
    return -(-output // page_size)


def needed_pages(started: Iterable[Request], ratio: ReserveRatio, page_size: int) -> int:
    """Return an estimate of the pages that started requests will still allocate, for their prompts and reserves."""
    total = 0
    for request in started:
        prompt_pages = -(-request.prefill_len // page_size)
        total += max(0, prompt_pages - len(request.pages)) + ratio.reserve_pages(request, page_size)
    return total


def steps_until_free(missing: int, started: Iterable[Request], ratio: ReserveRatio, page_size: int) -> int:
    """Return after how many steps `missing` pages are free or unreserved again if requests end by their length limits
    only; 0 if that is never."""
    for request in sorted(started, key=lambda candidate: candidate.num_unscheduled):
        missing -= len(request.pages) + needed_pages((request,), ratio, page_size)
        if missing <= 0:
            return request.num_unscheduled
    return 0
