"""Decode rows: started requests that have their prompt behind them and make one token a step.

Invariants: a row is scheduled only if the token it makes is within the request's limits, which is known before the
token is; its input is the last token of the sequence, known to the host or not.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.scheduler.reference.request import Request


def is_eligible(request: Request) -> bool:
    """Whether a started request may decode now. Not while it prefills; not once its last token is in flight;
    one that awaits its tokens not while any is."""
    return (
        request.kv_len >= request.prefill_len
        and len(request.tokens) + request.num_pending < request.max_len
        and not (request.num_pending and request.awaits_token)
    )


def count_eligible(started: Iterable[Request]) -> int:
    return sum(map(is_eligible, started))


def needs_page(request: Request, page_size: int) -> bool:
    """Whether the KV of its next input begins a page."""
    return request.kv_len % page_size == 0


def schedule_row(request: Request, step: int) -> None:
    """The row computes the KV of the last token and makes the next one."""
    request.kv_len += 1
    request.num_pending += 1
    request.last_step = step


def input_token(request: Request) -> int:
    """The input of a decode row just scheduled. A token that is not committed yet stands as -(slot + 1): the engine
    takes it from its own last_token[slot]."""
    position = request.kv_len - 1
    return request.tokens[position] if position < len(request.tokens) else -(request.slot + 1)
