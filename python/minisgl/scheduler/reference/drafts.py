"""Drafts: tokens that a step computes behind the one that is sure to come, because they may follow it.

Each drafted token has a decode row of its own: its request's slot again, at its next positions. So every engine
computes it as it computes any decode row, to the same bits, and each row makes one token. A row's token counts if the
tokens before it turned out to be those that it was computed from; the KV of the others is given back at the commit.

Invariants: a request owns pages beyond its `kv_len` only while its draft is in flight. It has no row in the step after
one with its draft: what comes next is not known before the commit.

What follows is looked up in the prefix cache, below the request's own node: there is what another text went on with
after the same tokens. Else in the request's own text (`drafter`). Where neither knows anything somebody outside may: an
event brings what a model of its own thinks.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.scheduler.parts import PrefixTree
from minisgl.scheduler.reference.request import Request, State


def propose(request: Request, tree: PrefixTree) -> None:
    """Guess what follows the committed tokens; where the next one is in flight, that one too."""
    drafter = request.drafter
    if drafter is None:
        return
    drafter.draft = []
    if len(request.tokens) < drafter.paused_until:
        return
    count = drafter.draft_len + request.num_pending
    if request.uses_cache and request.handle is not None:
        drafter.draft = tree.following(request.handle, request.tokens, request.num_tree_pages, count, request.namespace)
    if not drafter.draft:
        drafter.draft = drafter.guess(request.tokens, count)


def wanted(started: Sequence[Request], max_draft_len: int, max_rows: int) -> list[tuple[int, int]]:
    """See `ControlPlane.drafts_wanted`."""
    if len(started) * (1 + max_draft_len) > max_rows or any(request.is_prefilling for request in started):
        return []
    found = []
    for request in started:
        drafter = request.drafter
        if drafter is None or drafter.draft or len(request.tokens) < drafter.paused_until:
            continue
        count = min(drafter.draft_len, request.max_len - len(request.tokens) - 1)
        if count > 0:
            found.append((request.req_id, count))
    return found


def take(request: Request, length: int, tokens: Sequence[int]) -> None:
    """A draft from outside, of a text of `length` tokens."""
    drafter = request.drafter
    if drafter is None or drafter.in_flight or request.state is not State.STARTED or request.is_prefilling:
        return
    if length == len(request.tokens) >= drafter.paused_until:
        drafter.draft = list(tokens[: drafter.draft_len + request.num_pending])


def draft_len(request: Request) -> int:
    """Tokens that may be computed behind the row of the request that the step has."""
    drafter = request.drafter
    return min(len(drafter.draft), request.num_unscheduled) if drafter is not None and request.num_pending == 1 else 0


def num_new_pages(request: Request, num_tokens: int, page_size: int) -> int:
    """Pages that a draft needs beyond those of the request."""
    return -(-(request.kv_len + num_tokens) // page_size) - len(request.pages)


def schedule_draft(request: Request, num_tokens: int, tree: PrefixTree) -> None:
    """The step computes so many tokens of the request's draft."""
    drafter = request.drafter
    if drafter is not None:
        request.pages += tree.take(num_new_pages(request, num_tokens, tree.page_size))
        drafter.in_flight = drafter.draft[:num_tokens]


def settle(request: Request, tree: PrefixTree) -> None:
    """The step with the request's draft is committed: pages that the text did not get to are given back."""
    drafter = request.drafter
    if drafter is None:
        return
    num_accepted = len(request.tokens) - 1 - request.kv_len
    request.kv_len += num_accepted
    num_pages = -(-request.kv_len // tree.page_size)
    tree.free(request.pages[num_pages:])
    del request.pages[num_pages:]
    drafter.in_flight = []
    drafter.learn(num_accepted, len(request.tokens))
