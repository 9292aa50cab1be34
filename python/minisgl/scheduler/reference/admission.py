"""How much of a prompt a step takes in, and whether a waiting request may start.

Sizing changes nothing, so what fails leaves no trace; integers only, so that two implementations agree.

A request holds on admission only the pages of its first chunk. Whether it may start is decided by an estimate: its own
prompt and a share (the ratio) of the output it may still make, and the same for everyone started, must fit into what
is free or evictable. The ratio falls while that goes well and jumps after a retraction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minisgl.scheduler.reference.radix import Match, RadixTree
from minisgl.scheduler.reference.request import Request

MAX_OUTPUT_ESTIMATE = 4096  # tokens
RATIO_BITS = 10  # the ratio is in 1/1024
RATIO_START, RATIO_MIN, RATIO_MAX = 716, 102, 1024
RATIO_UP, RATIO_DOWN = 256, 1


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What a prefill row could get now: `match`, then `num_tokens` computed, for which it takes `num_new_pages`.
    With 0 tokens it gets nothing; `lacks_pages` says whether with more pages it would get more."""

    match: Match
    num_tokens: int
    num_new_pages: int
    lacks_pages: bool = False

    @property
    def num_page_changes(self) -> int:
        return len(self.match.pages) + self.num_new_pages


def size_chunk(request: Request, tree: RadixTree, budget: int, max_page_changes: int) -> Chunk:
    """Size the next chunk of a request that prefills, or of a waiting one. Changes nothing.

    First the match goes on from the request's own node, but leaves at least one token to compute: a full hit stops
    at (length - 1) // page_size pages. Then min(`budget`, what is left) tokens, cut to a page border unless that
    reaches the end, shrunk to the pages that are free or evictable (those matched are about to be protected).
    Nothing, if the page-table entries exceed `max_page_changes`.
    """
    size = tree.page_size
    length = request.prefill_len if request.handle is not None else len(request.tokens)
    num_pages = len(request.pages)
    max_match = (length - 1) // size if request.uses_cache else 0
    match = tree.match(request.handle or tree.root, request.tokens, num_pages, max_match, request.namespace)
    remaining = length - (num_pages + len(match.pages)) * size
    num_tokens = min(budget, remaining)
    if num_tokens < remaining:
        num_tokens -= num_tokens % size
    if num_tokens <= 0:
        return Chunk(match, 0, 0)
    available = tree.num_available - match.num_unlocked
    num_new_pages = -(-num_tokens // size)
    lacks_pages = num_new_pages > available
    if lacks_pages:
        num_new_pages, num_tokens = available, available * size
    if len(match.pages) + num_new_pages > max_page_changes:
        return Chunk(match, 0, 0)
    return Chunk(match, num_tokens, num_new_pages, lacks_pages)


def apply_chunk(request: Request, chunk: Chunk, tree: RadixTree) -> None:
    """Lock what was matched, take the pages, and let the full ones enter the tree, locked by the request.

    They enter before they are computed. That is sound because forwards run in order and a forward stores the KV of all
    its rows, layer by layer, before any row attends. A page that the tree has already (a full hit stopped before it)
    stays with the request, as does a partial one.
    """
    size = tree.page_size
    handle = request.handle or tree.root
    if request.uses_cache:
        handle = tree.descend(handle, chunk.match)
    request.pages += chunk.match.pages
    first = len(request.pages)
    request.kv_len = first * size + chunk.num_tokens
    new_pages = tree.take(chunk.num_new_pages)
    request.pages += new_pages
    if request.uses_cache:
        request.num_tree_pages = first
        full = chunk.num_tokens // size
        if full and not tree.has_page(handle, request.tokens, first, request.namespace):
            tokens = request.tokens[first * size : (first + full) * size]
            handle = tree.append(handle, tokens, new_pages[:full], request.namespace)
            request.num_tree_pages = first + full
    request.handle = handle


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


def fits(request: Request, match: Match, needed_by_started: int, ratio: ReserveRatio, tree: RadixTree) -> bool:
    """The estimate for a waiting `request` of which `match` is cached."""
    rest = -(-len(request.tokens) // tree.page_size) - len(match.pages)
    needed = rest + ratio.reserve_pages(request, tree.page_size) + needed_by_started
    return needed <= tree.num_available - match.num_unlocked
