"""How much of a prompt a step takes in, and whether a waiting request may start.

Sizing changes nothing, so what fails leaves no trace; integers only, so that two implementations agree.

A request holds on admission only the pages of its first chunk. Whether it may start is decided by an estimate: its own
prompt and a share (the ratio) of the output it may still make, and the same for everyone started, must fit into what
is free or evictable. The ratio falls while that goes well and jumps after a retraction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from minisgl.scheduler.reference.radix import Match, Node, RadixTree
from minisgl.scheduler.reference.request import Request

MAX_OUTPUT_ESTIMATE = 4096  # tokens
RATIO_BITS = 10  # the ratio is in 1/1024
RATIO_START, RATIO_MIN, RATIO_MAX = 716, 102, 1024
RATIO_UP, RATIO_DOWN = 256, 1
LOADED_TOKENS = 256  # as many that are loaded count as one that is computed: small models copy no more in its time


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What a prefill row could get now: `match`, then `num_loads` pages that are loaded, then `num_tokens` computed,
    for which it takes `num_new_pages`; `cost` of the step's budget. With 0 tokens it gets nothing; `lacks_pages` says
    whether with more pages it would get more."""

    match: Match
    num_tokens: int
    num_new_pages: int
    lacks_pages: bool = False
    num_found: int = 0  # pages that are cached, those of `match` and those that no checkpoint leads to
    num_covered: int = 0  # of the latter, those that the chunk computes again, into nothing
    num_loads: int = 0
    begins_stored: bool = False  # with the state that is at hand behind the pages that are loaded
    cost: int = 0

    @property
    def num_page_changes(self) -> int:
        return len(self.match.pages) + self.num_covered + self.num_loads + self.num_new_pages


def size_chunk(request: Request, tree: RadixTree, budget: int, max_page_changes: int, step: int = 0) -> Chunk:
    """Size the next chunk of a request that prefills, or of a waiting one. Changes nothing.

    First the match goes on from the request's own node, but leaves at least one token to compute: a full hit stops
    at (length - 1) // page_size pages. Then min(`budget`, what is left) tokens, cut to a page border unless that
    reaches the end, shrunk to the pages that are free or evictable (those matched are about to be protected).
    Nothing, if the page-table entries exceed `max_page_changes`.

    Between the two come pages that can be loaded, as many as the budget allows (see `LOADED_TOKENS`), if they leave a
    page to compute in. Where it allows fewer than there are, a page is computed, and the next chunk loads more.

    Of a model with states the match ends with a checkpoint. Tokens behind it whose pages are cached are computed for
    the state alone: the row has those pages, and writes nothing to them. Where a state is at hand that is behind more
    tokens, the row begins with that: its match ends there at most, whatever has a checkpoint, and all pages between are
    loaded at once.
    """
    size = tree.page_size
    length = request.prefill_len if request.handle is not None else len(request.tokens)
    num_pages = len(request.pages)
    found = _find(request, length, tree, step)
    match, num_found, num_loadable = found.match, found.num_found, found.num_loadable
    available = tree.num_available - match.num_unlocked
    num_loads = num_loadable if found.has_state else min(num_loadable, max(budget, 0) * LOADED_TOKENS // size)
    remaining = length - (num_pages + len(match.pages) + num_loads) * size
    num_tokens = min(budget, remaining if num_loads == num_loadable else size)
    if num_tokens < remaining:
        num_tokens -= num_tokens % size
    if num_tokens <= 0:
        return Chunk(match, 0, 0)
    available -= num_loads
    num_covered = min(num_found - len(match.pages), num_tokens // size)
    num_new_pages = -(-num_tokens // size) - num_covered
    lacks_pages = num_new_pages > available
    if lacks_pages:
        num_new_pages, num_tokens = available, (num_covered + available) * size
    if len(match.pages) + num_covered + num_loads + num_new_pages > max_page_changes:
        return Chunk(match, 0, 0)
    cost = num_tokens + num_loads * size // LOADED_TOKENS
    return Chunk(
        match, num_tokens, num_new_pages, lacks_pages, num_found, num_covered, num_loads, found.has_state, cost
    )


def cached_len(request: Request, tree: RadixTree, step: int) -> int:
    """Tokens of a waiting request that `step` need not compute: they are cached, or at hand."""
    found = _find(request, len(request.tokens), tree, step)
    return (len(found.match.pages) + found.num_loadable) * tree.page_size


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What a row need not compute: the match, how many pages are cached, those among them that no checkpoint leads to,
    how many can be loaded behind the match, and whether it then begins with the state that is at hand."""

    match: Match
    num_found: int
    num_loadable: int
    has_state: bool = False


def _find(request: Request, length: int, tree: RadixTree, step: int) -> _Found:
    """What is cached of the first `length` tokens of a request, for a row of `step`."""
    num_pages = len(request.pages)
    max_match = (length - 1) // tree.page_size if request.uses_cache else 0
    start = request.handle or tree.root
    match = tree.match(start, request.tokens, num_pages, max_match, request.namespace)
    num_found = len(match.pages)
    available = tree.num_available - match.num_unlocked
    first, end = request.stored
    if tree.checkpoints is None:
        count = min(end, max_match) - num_pages - num_found if first <= num_pages + num_found else 0
        return _Found(match, num_found, count if 0 < count < available else 0)
    saved = tree.beginning(start, match, step)
    if num_pages + len(saved.pages) < end <= max_match and first <= num_pages + num_found:
        before = tree.match(start, request.tokens, num_pages, end, request.namespace)
        count = end - num_pages - len(before.pages)
        if count < available:
            return _Found(replace(before, num_unlocked=match.num_unlocked), num_found, count, has_state=True)
    return _Found(saved, num_found, 0)


Saves = list[tuple[int, int]]
"""Tokens into the row, and the slot to which its state goes when it has passed them."""


def apply_chunk(request: Request, chunk: Chunk, tree: RadixTree) -> tuple[Node, int]:
    """Lock what was matched, take the pages, and let the full ones enter the tree, locked by the request.

    They enter before they are computed or loaded. That is sound because forwards run in order and a forward stores the
    KV of all its rows, layer by layer, before any row attends. A page that the tree has already (a full hit stopped
    before it) stays with the request, as does a partial one.

    Returns where the chunk begins: the node that ends there, and the pages before.
    """
    size = tree.page_size
    handle = request.handle or tree.root
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
    request: Request, chunk: Chunk, tree: RadixTree, begin: tuple[Node, int], interval: int, step: int
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


def _borders(request: Request, chunk: Chunk, first: int, tree: RadixTree, interval: int) -> list[int]:
    """After which pages of its text a chunk that computes from page `first` on saves its state: every `interval`
    tokens, the last from which the whole text can be found, and where the text leaves another one's that has no
    checkpoint. One that begins with what was at hand saves that, too."""
    if tree.checkpoints is None or not request.uses_cache:
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
        output = min(request.num_unscheduled, MAX_OUTPUT_ESTIMATE) * self.value >> RATIO_BITS
        return -(-output // page_size)


def needed_pages(started: Iterable[Request], ratio: ReserveRatio, page_size: int) -> int:
    """Estimated pages that started requests will yet take: the rest of their prompts and their reserves."""
    total = 0
    for request in started:
        prompt_pages = -(-request.prefill_len // page_size)
        total += max(0, prompt_pages - len(request.pages)) + ratio.reserve_pages(request, page_size)
    return total


def num_missing(request: Request, match: Match, needed_by_started: int, ratio: ReserveRatio, tree: RadixTree) -> int:
    """The estimate for a waiting `request` of which `match` is cached: pages that it lacks."""
    rest = -(-len(request.tokens) // tree.page_size) - len(match.pages)
    needed = rest + ratio.reserve_pages(request, tree.page_size) + needed_by_started
    return max(0, needed - (tree.num_available - match.num_unlocked))


def steps_until_room(missing: int, started: Iterable[Request], ratio: ReserveRatio, page_size: int) -> int:
    """After how many steps so many pages have come back, with what was set aside, if all end by their limits alone."""
    for request in sorted(started, key=lambda one: one.num_unscheduled):
        missing -= len(request.pages) + needed_pages((request,), ratio, page_size)
        if missing <= 0:
            return request.num_unscheduled
    return 0
