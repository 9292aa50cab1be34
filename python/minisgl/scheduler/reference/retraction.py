"""Releases a request's pages: at its end, and at a retraction (back to the waiting queue, because pages are short).

Invariants: a released page belongs to the tree or the pool when the call returns; a page that the tree already has is
freed; locks are released last, deepest node first.

Pages may be allocated again at once, while a step in flight still reads them: forwards run in one ordered stream, so
the next owner writes later.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.parts import PrefixTree
from minisgl.scheduler.reference.radix import NO_CHECKPOINT
from minisgl.scheduler.reference.request import NO_SLOT, NO_STEP, Request, RequestQueue


def pick_victim(started: RequestQueue, for_request: Request) -> Request | None:
    """Return the request to retract so that `for_request` gets a page: the last one started; `None` if that is
    `for_request` itself, which then waits. The victim has no row yet, because rows are planned in request order."""
    last = started.last
    return None if last is for_request else last


def give_up_pages(request: Request, tree: PrefixTree) -> None:
    """Insert the request's own full pages into the tree (not with a "naive" cache), free the others by ascending
    column, and release the lock. With recurrent layers, only pages up to the request's checkpoint are inserted.

    All inserted tokens are known: only the token that the last scheduled row samples can be unknown, and that has no KV
    yet.
    """
    handle = request.handle
    if handle is None:
        raise ControlPlaneError(f"request {request.req_id} has no pages to give up")
    size = tree.page_size
    first = request.num_tree_pages
    freed = request.pages[first:]
    full = request.kv_len // size if not tree.has_states else max(first, request.tail_len // size)
    if tree.policy != "naive" and full > first:
        if request.kv_len > len(request.tokens):
            raise ControlPlaneError(f"request {request.req_id}: KV of unknown tokens would enter the cache")
        handle, had = tree.insert(handle, request.tokens, request.pages[:full], first, request.namespace)
        freed = request.pages[first:had] + request.pages[full:]
        if tree.has_states and tree.checkpoint(handle) == NO_CHECKPOINT:
            tree.put_checkpoint(handle, request.tail, request.tail_step)
            request.tail = NO_CHECKPOINT
    tree.free(freed)
    if request.tail != NO_CHECKPOINT:
        tree.free_slot(request.tail)
    tree.release(handle)
    forget_pages(request)


def drop_pages(request: Request, tree: PrefixTree) -> None:
    """Release the pages of a finished request whose prompt is too long for the cache: free its own pages, and remove
    those that it added to the tree since its first admission and that nothing else uses. (Pages that a retraction
    inserted for a request that matches nothing stay: how much was cached before is not known.)"""
    handle = tree.root if request.handle is None else request.handle
    first = request.num_tree_pages
    match = tree.match(handle, request.tokens, first, len(request.tokens) // tree.page_size, request.namespace)
    tree.free(request.pages[first:])
    if request.tail != NO_CHECKPOINT:
        tree.free_slot(request.tail)
    tree.release(handle)
    if request.uses_cache and request.num_found_pages is not None and match.end is not None:
        tree.drop(match.end, first + len(match.pages), request.num_found_pages)
    forget_pages(request)


def free_pages(request: Request, tree: PrefixTree) -> None:
    """Free the request's own pages and release its lock."""
    tree.free(request.pages[request.num_tree_pages :])
    if request.tail != NO_CHECKPOINT:
        tree.free_slot(request.tail)
    tree.release(tree.root if request.handle is None else request.handle)
    forget_pages(request)


def drop_path(request: Request, tree: PrefixTree) -> None:
    """Remove the request's sequence from the tree, as far as nothing else uses it, because a row of it is not finite.
    (A request that shares those pages will not be finite either, and the last one removes them.)"""
    match = tree.match(tree.root, request.tokens, 0, len(request.tokens) // tree.page_size, request.namespace)
    if match.end is not None:
        tree.drop(match.end, len(match.pages), 0)


def forget_pages(request: Request) -> None:
    """Reset the request's page fields, draft and stored pages. The caller must have released its pages and slot."""
    request.handle = None
    request.pages = []
    request.num_tree_pages = request.kv_len = request.prefill_len = 0
    request.slot = NO_SLOT
    request.tail, request.tail_len, request.tail_step = NO_CHECKPOINT, 0, NO_STEP
    request.stored = (0, 0)
    if request.drafter is not None:
        request.drafter.draft, request.drafter.in_flight = [], []
