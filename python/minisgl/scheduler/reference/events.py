"""Checks the events of a `schedule` call before anything is changed.

Keeps true: an event that passes can be applied without an error; `EventError` names the first that doesn't.
Doesn't know: how events are applied. (Whether a prompt fits is no error of the event: the request is answered.)
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from minisgl.step import Arrival, EventError, Events, ForwardFailed

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def check_events(events: Events, live_ids: Container[int], oldest_in_flight: int | None) -> None:
    """Raise `EventError` at the first malformed event. `oldest_in_flight`: the next step due for its commit."""
    new_ids: set[int] = set()
    for index, event in enumerate(events):
        match event:
            case Arrival():
                _check_arrival(index, event)
                if event.req_id in live_ids or event.req_id in new_ids:
                    raise EventError(index, "req_id", f"{event.req_id} is in use")
                new_ids.add(event.req_id)
            case ForwardFailed(step):
                if index:
                    raise EventError(index, "step", "a failed forward must be the first event")
                if step != oldest_in_flight:
                    raise EventError(index, "step", f"{step} is not the oldest step in flight ({oldest_in_flight})")


def _check_arrival(index: int, arrival: Arrival) -> None:
    def need(ok: bool, field: str, reason: str) -> None:
        if not ok:
            raise EventError(index, field, reason)

    tokens = arrival.tokens
    need(-MAX_INT64 <= arrival.req_id <= MAX_INT64, "req_id", "must be a signed 64-bit integer")
    need(isinstance(tokens, np.ndarray) and tokens.dtype == np.int32, "tokens", "must be an int32 array")
    need(tokens.ndim == 1, "tokens", "must have one dimension")
    need(len(tokens) > 0, "tokens", "must not be empty")
    need(int(tokens.min()) >= 0, "tokens", "must not be negative")
    need(arrival.num_prompt >= 1, "num_prompt", "must be at least 1")
    need(arrival.num_generated >= 0, "num_generated", "must be at least 0")
    need(
        arrival.num_prompt + arrival.num_generated == len(tokens),
        "num_prompt",
        f"{arrival.num_prompt} and num_generated {arrival.num_generated} don't add up to {len(tokens)} tokens",
    )
    need(arrival.max_tokens >= 1, "max_tokens", "must be at least 1")
    need(arrival.max_tokens > arrival.num_generated, "max_tokens", "must exceed num_generated")
    need(arrival.min_tokens >= 0, "min_tokens", "must be at least 0")
    need(-MAX_INT32 <= arrival.priority <= MAX_INT32, "priority", "must be a signed 32-bit integer")
