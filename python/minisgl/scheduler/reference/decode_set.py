"""Decode rows: started requests whose prompt is computed, one token per step.

Invariants: a row is scheduled only if its new token is within the request's limits, which is known before the token is;
its input is the last token of the sequence, whether the host knows it yet or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.scheduler.reference.request import Request


def is_eligible(request: Request) -> bool:
    """Return whether a started request may decode in this step. False while it prefills, once its last token is in
    flight, and while any token is in flight if it must wait for it."""
    return (
        request.kv_len >= request.prefill_len
        and len(request.tokens) + request.num_pending < request.max_len
        and not (request.num_pending and request.awaits_token)
    )


def count_eligible(started: Iterable[Request]) -> int:
    return sum(map(is_eligible, started))


def needs_page(request: Request, page_size: int) -> bool:
    """Return whether the KV of the next input token begins a new page."""
    return request.kv_len % page_size == 0


def schedule_row(request: Request, step: int) -> None:
    """Add a decode row to the request: it computes the KV of the last token and samples the next one."""
    request.kv_len += 1
    request.num_pending += 1
    request.last_step = step


def input_token(request: Request) -> int:
    """Return the input of a decode row that was just scheduled. A token that is not committed yet is -(slot + 1): the
    engine replaces it by its own last_token[slot]."""
    position = request.kv_len - 1
    return request.tokens[position] if position < len(request.tokens) else -(request.slot + 1)
