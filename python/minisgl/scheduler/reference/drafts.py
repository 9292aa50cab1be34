"""Draft tokens: a step computes them after the sampled token, because they may follow it (speculative decoding).

Each draft token has its own decode row with the request's slot, at the next positions. So every engine computes it like
any decode row, bit for bit, and each row samples one token. A row's token is accepted if the sampled tokens before it
equal the tokens that it was computed from; the KV of the others is freed at the commit.

Invariants: a request owns pages beyond its `kv_len` only while its draft is in flight. It has no row in the step after
one with its draft: its next token is not known before the commit.

Drafts come from the prefix cache, below the request's own node: another sequence continued there after the same tokens.
If that has none, from the request's own sequence (`drafter`), or from a draft model by a `Draft` event.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.scheduler.parts import PrefixTree
from minisgl.scheduler.reference.request import Request, State


def propose(request: Request, tree: PrefixTree) -> None:
    """Draft the tokens that follow the committed ones. With a token in flight, the draft begins with that token."""
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
        drafter.draft = drafter.propose(request.tokens, count)


def find_draftable(started: Sequence[Request], max_draft_len: int, max_rows: int) -> list[tuple[int, int]]:
    """Return (request id, max. draft length) of requests that can use a draft: see `ControlPlane.drafts_wanted`."""
    if len(started) * (1 + max_draft_len) > max_rows or any(request.is_prefilling for request in started):
        return []
    draftable = []
    for request in started:
        drafter = request.drafter
        if drafter is None or drafter.draft or len(request.tokens) < drafter.paused_until:
            continue
        count = min(drafter.draft_len, request.max_len - len(request.tokens) - 1)
        if count > 0:
            draftable.append((request.req_id, count))
    return draftable


def take(request: Request, length: int, tokens: Sequence[int]) -> None:
    """Store an external draft for a sequence of `length` tokens. Ignored if the request does not decode, has a draft in
    flight, pauses, or has another length."""
    drafter = request.drafter
    if drafter is None or drafter.in_flight or request.state is not State.STARTED or request.is_prefilling:
        return
    if length == len(request.tokens) >= drafter.paused_until:
        drafter.draft = list(tokens[: drafter.draft_len + request.num_pending])


def draft_len(request: Request) -> int:
    """Return how many draft tokens may be computed after the request's decode row of this step."""
    drafter = request.drafter
    return min(len(drafter.draft), request.num_unscheduled) if drafter is not None and request.num_pending == 1 else 0


def num_new_pages(request: Request, num_tokens: int, page_size: int) -> int:
    """Return how many pages a draft of `num_tokens` needs beyond those of the request."""
    return -(-(request.kv_len + num_tokens) // page_size) - len(request.pages)


def schedule_draft(request: Request, num_tokens: int, tree: PrefixTree) -> None:
    """Schedule the first `num_tokens` draft tokens of the request in this step, and allocate their pages."""
    drafter = request.drafter
    if drafter is not None:
        request.pages += tree.take(num_new_pages(request, num_tokens, tree.page_size))
        drafter.in_flight = drafter.draft[:num_tokens]


def settle(request: Request, tree: PrefixTree) -> None:
    """Finish the request's draft after its step's commit: count accepted tokens, free the pages of rejected ones."""
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
