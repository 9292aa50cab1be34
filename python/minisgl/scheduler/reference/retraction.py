"""Giving up pages: at a request's end, and when it is sent back to the queue because pages lack.

Invariants: a page that a request gives up belongs to the tree or to the pool before the call returns; what the tree
has already is freed; the lock goes last, deepest node first.

Pages may be given out again at once, while a step in flight still reads them: forwards run in one ordered stream, so
whoever gets them writes later.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.parts import PrefixTree
from minisgl.scheduler.reference.radix import NO_CHECKPOINT
from minisgl.scheduler.reference.request import NO_SLOT, NO_STEP, Request, RequestQueue


def pick_victim(started: RequestQueue, for_request: Request) -> Request | None:
    """Whom to retract so that `for_request` gets a page: the last one started. Never itself (it waits), and never
    one in the plan: rows are planned in order, so whoever stands behind `for_request` is not in it yet."""
    last = started.last
    return None if last is for_request else last


def give_up_pages(request: Request, tree: PrefixTree) -> None:
    """Full pages of the tail enter the tree below the node that the request locks (with a "naive" cache they don't),
    the rest is freed by ascending column, the lock is released. Of a model with states those enter at whose end the
    request has a checkpoint.

    The tail's KV goes as far as inputs were scheduled. Their tokens are all known by now: only the token that the last
    scheduled row makes can be unknown, and it is no input yet.
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
    """At the end of a request whose prompt is too long to be kept: its tail is freed, and with it what the request
    brought into the tree, beyond what it found there when it was first admitted, as far as nobody else has it. (What a
    retraction put there of a request that matches nothing stays: it does not know what it had found.)"""
    handle = tree.root if request.handle is None else request.handle
    first = request.num_tree_pages
    found = tree.match(handle, request.tokens, first, len(request.tokens) // tree.page_size, request.namespace)
    tree.free(request.pages[first:])
    if request.tail != NO_CHECKPOINT:
        tree.free_slot(request.tail)
    tree.release(handle)
    if request.uses_cache and request.num_found_pages is not None and found.end is not None:
        tree.drop(found.end, first + len(found.pages), request.num_found_pages)
    forget_pages(request)


def free_pages(request: Request, tree: PrefixTree) -> None:
    """The tail is freed, and the lock is released."""
    tree.free(request.pages[request.num_tree_pages :])
    if request.tail != NO_CHECKPOINT:
        tree.free_slot(request.tail)
    tree.release(tree.root if request.handle is None else request.handle)
    forget_pages(request)


def drop_path(request: Request, tree: PrefixTree) -> None:
    """A row of the request is not finite: the tree forgets the request's text, as far as nobody else has it. (Who
    has it reads the same numbers, is found out as well, and the last one drops it.)"""
    found = tree.match(tree.root, request.tokens, 0, len(request.tokens) // tree.page_size, request.namespace)
    if found.end is not None:
        tree.drop(found.end, len(found.pages), 0)


def forget_pages(request: Request) -> None:
    """The request holds nothing any more, no draft and nothing to be loaded either. Its slot is the scheduler's
    business, and must be taken before."""
    request.handle = None
    request.pages = []
    request.num_tree_pages = request.kv_len = request.prefill_len = 0
    request.slot = NO_SLOT
    request.tail, request.tail_len, request.tail_step = NO_CHECKPOINT, 0, NO_STEP
    request.stored = (0, 0)
    if request.drafter is not None:
        request.drafter.draft, request.drafter.in_flight = [], []
