"""Validates the scheduler's input: the configuration, the events and the sampled tokens.

Invariants: an event that passes can be applied without an error; `EventError` names the first that does not pass.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import pairwise
from typing import get_args

import numpy as np

from minisgl.scheduler.api import ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.policies import CachePolicy, SchedulePolicy
from minisgl.step import (
    NOT_FINITE,
    Abort,
    Arrival,
    Draft,
    EventError,
    Events,
    ForwardFailed,
    Int32Array,
    PagesRead,
    StepBuffers,
    TokenBudget,
    Unpin,
)

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


def check_config(config: ControlPlaneConfig) -> None:
    """Raise `ValueError` at the first invalid field, which the text names."""
    for name in ("num_pages", "page_size", "max_running_requests", "max_prefill_length", "context_len"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: {getattr(config, name)}: must be at least 1")
    unsigned = ("max_pinned_pages", "cache_token_budget", "cache_max_prompt", "max_draft_len")
    for name in (*unsigned, "checkpoint_interval", "num_checkpoints"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}: {getattr(config, name)}: must be at least 0")
    if config.max_pinned_pages > config.num_pinnable_pages:
        raise ValueError(
            f"max_pinned_pages: {config.max_pinned_pages}: must be at most {config.num_pinnable_pages}, which leaves "
            "room for the longest request"
        )
    for name, policies in (("cache", get_args(CachePolicy)), ("schedule_policy", get_args(SchedulePolicy))):
        if getattr(config, name) not in policies:
            raise ValueError(f"{name}: {getattr(config, name)!r}: must be one of {', '.join(policies)}")
    if config.checkpoint_interval % config.page_size:
        raise ValueError(
            f"checkpoint_interval: {config.checkpoint_interval}: must be whole pages of {config.page_size}"
        )
    if config.num_checkpoints and not config.checkpoint_interval:
        raise ValueError(f"num_checkpoints: {config.num_checkpoints}: needs checkpoint_interval above 0")
    if config.checkpoint_interval and config.max_draft_len:
        raise ValueError(f"max_draft_len: {config.max_draft_len}: must be 0 with checkpoint_interval")
    if any(a >= b for a, b in pairwise((0, *config.graph_sizes))):
        raise ValueError(f"graph_sizes: {config.graph_sizes}: must be positive and ascending")


def check_buffers(config: ControlPlaneConfig, buffers: StepBuffers) -> None:
    """Raise `ValueError` if `buffers` were made for another configuration."""
    if buffers.limits != config.limits():
        raise ValueError(f"the buffers were made for {buffers.limits}, not for {config.limits()}")
    if max(config.graph_sizes, default=0) > len(buffers.ring[0].req_slots):
        raise ValueError(f"graph_sizes: {config.graph_sizes}: the buffers hold {len(buffers.ring[0].req_slots)} rows")


def check_events(
    events: Events,
    live_ids: Container[int],
    oldest_in_flight: int | None,
    pinned: Mapping[int, int],
    config: ControlPlaneConfig,
) -> None:
    """Raise `EventError` at the first invalid event. `oldest_in_flight` is the step that is due for its commit.
    `pinned` has the pages that are pinned, or will be, by request id (if the first event is a `ForwardFailed`: after
    it). Pages that an earlier `Abort` or `Unpin` releases may be pinned again in the same call; its request id is free
    from the next call on."""
    new_ids: set[int] = set()
    pages = dict(pinned)
    for index, event in enumerate(events):
        match event:
            case Arrival():
                _check_arrival(index, event)
                if event.req_id in live_ids or event.req_id in pinned or event.req_id in new_ids:
                    raise EventError(index, "req_id", f"{event.req_id} is in use")
                new_ids.add(event.req_id)
                if event.pin:
                    _check_pin(index, event, sum(pages.values()), config)
                    pages[event.req_id] = event.num_prompt // config.page_size
            case Unpin(req_id):
                pages.pop(req_id, None)
            case Abort(req_id) if req_id in live_ids or req_id in new_ids:
                pages.pop(req_id, None)
            case TokenBudget():
                for name in ("beside_decode", "prefill_only", "background"):
                    if getattr(event, name) < 1:
                        raise EventError(index, name, "must be at least 1")
            case PagesRead():
                for name in ("stored_from", "stored_to"):
                    if getattr(event, name) < 0:
                        raise EventError(index, name, "must be at least 0")
            case Draft(tokens=tokens) if not all(0 <= token <= MAX_INT32 for token in tokens):
                raise EventError(index, "tokens", "must be unsigned 31-bit integers")
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
    need(0 <= arrival.namespace <= MAX_INT32, "namespace", "must be an unsigned 31-bit integer")
    need(arrival.stored_from >= 0, "stored_from", "must be at least 0")
    need(0 <= arrival.stored_to <= len(tokens), "stored_to", "must be at least 0, and no more pages than tokens")


def _check_pin(index: int, arrival: Arrival, num_pinned: int, config: ControlPlaneConfig) -> None:
    num_pages, limit = arrival.num_prompt // config.page_size, config.max_pinned_pages
    if config.cache == "naive":
        raise EventError(index, "pin", "the cache is naive and keeps nothing")
    if arrival.no_match:
        raise EventError(index, "pin", "must not come with no_match")
    if num_pinned + num_pages > limit:
        raise EventError(index, "pin", f"{num_pages} pages beside {num_pinned} exceed max_pinned_pages {limit}")


def sampled_tokens(step: int, num_rows: int, sample_rows: list[int], tokens: Int32Array) -> tuple[list[int], list[int]]:
    """Return the sampled tokens of `sample_rows`, in order, and the other rows that are `NOT_FINITE`. Raises
    `ControlPlaneError` for a wrong dtype or shape, and for other negative tokens: they would look like placeholders."""
    if tokens.dtype != np.int32 or tokens.shape != (num_rows,):
        raise ControlPlaneError(f"tokens of step {step}: {tokens.dtype} {tokens.shape} for {num_rows} rows")
    sampled: list[int] = tokens[sample_rows].tolist() if sample_rows else []
    if not len(tokens) or tokens.min() >= 0:
        return sampled, []
    if any(token < 0 and token != NOT_FINITE for token in sampled):
        raise ControlPlaneError(f"step {step} sampled a negative token")
    return sampled, sorted(set(np.flatnonzero(tokens == NOT_FINITE).tolist()).difference(sample_rows))
