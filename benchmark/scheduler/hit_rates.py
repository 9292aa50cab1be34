"""Prefix hit rates of the radix cache over a trace, beside a plain LRU of whole blocks that is simulated here.

One request at a time, page size 512, as the blocks of the trace. The plain LRU knows blocks by id, touches those of a
prompt from first to last and forgets the oldest; what counts is the unbroken run of known blocks from the first on.

Both count the same thing: prompt tokens found, of all prompt tokens; a block that is not whole is no page.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from minisgl.bench.traces import BLOCK, TraceRequest, prompt_tokens
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import CachePolicy
from minisgl.step import Arrival, Events

VOCABULARY = 100_000


def whole_blocks(request: TraceRequest) -> tuple[int, ...]:
    return request.blocks[: request.input_len // BLOCK]


def lru_runs(blocks: list[tuple[int, ...]], capacity: int) -> int:
    """Blocks of unbroken runs that an LRU of `capacity` blocks knows, over prompts given as their blocks."""
    known: OrderedDict[int, None] = OrderedDict()
    found = 0
    for one in blocks:
        found += next((i for i, block in enumerate(one) if block not in known), len(one))
        for block in one:
            known[block] = None
            known.move_to_end(block)
        while len(known) > capacity:
            known.popitem(last=False)
    return found


def radix(requests: list[TraceRequest], num_pages: int, cache: CachePolicy, backend: str = "rust_hotpath") -> int:
    """Prompt tokens that the scheduler's cache finds. A request that runs holds its pages out of `num_pages`."""
    config = ControlPlaneConfig(
        num_pages=num_pages,
        page_size=BLOCK,
        max_running_requests=1,
        max_prefill_length=10**6,
        context_len=10**6,
        cache=cache,
    )
    plane = make_control_plane(backend, config)
    step, token = 0, np.array([VOCABULARY], np.int32)
    for place, request in enumerate(requests):
        tokens = prompt_tokens(request, place, VOCABULARY)
        events = Events([Arrival(place, tokens, len(tokens), 1)])
        while plane.stats().num_live or len(events):
            plan = plane.schedule(step, events)
            plane.commit(step, token[: plan.num_rows])
            events, step = Events(), step + 1
    assert plane.stats().num_prompt_tokens_total == sum(one.input_len for one in requests), "a prompt was refused"
    return plane.stats().num_cached_tokens_total


def unlimited(requests: list[TraceRequest]) -> dict[str, float]:
    """With room for everything: what the cache finds, and where the rest of the trace's own rate goes.

    `published_by_blocks` is the rate that the trace is published with: of blocks, the last of a prompt counted as one
    however short it is."""
    ever: set[int] = set()
    whole: set[int] = set()
    total = by_blocks = recomputed = blocks = blocks_found = 0
    for request in requests:
        blocks += len(request.blocks)
        blocks_found += next((i for i, one in enumerate(request.blocks) if one not in ever), len(request.blocks))
        ever.update(request.blocks)
        own = whole_blocks(request)
        known = next((i for i, one in enumerate(own) if one not in whole), len(own))
        whole.update(own)
        total += request.input_len
        by_blocks += known * BLOCK
        recomputed += BLOCK if known * BLOCK == request.input_len else 0
    found = radix(requests, len(ever) + 3 * len(requests) + BLOCK, "lru")
    return {
        "found": found / total,
        "by_whole_blocks": by_blocks / total,
        "published_by_blocks": blocks_found / blocks,
        "recomputed_last_pages": recomputed / total,
        "unaccounted_tokens": by_blocks - recomputed - found,
    }


def by_pool_size(requests: list[TraceRequest], sizes: list[int]) -> list[dict[str, Any]]:
    """One record a pool size: shares of prompt tokens found by the radix cache (LRU, LFU) and by the plain LRU, and the
    share of blocks by which such rates are published: the last of a prompt counted as one however short it is."""
    total = sum(one.input_len for one in requests)
    whole, every = [whole_blocks(one) for one in requests], [one.blocks for one in requests]
    records = []
    for size in sizes:
        record = {
            "pool_blocks": size,
            "radix_lru": radix(requests, size, "lru") / total,
            "radix_lfu": radix(requests, size, "lfu") / total,
            "plain_lru": BLOCK * lru_runs(whole, size) / total,
            "plain_lru_by_blocks": lru_runs(every, size) / sum(map(len, every)),
        }
        print("hit rate", record, flush=True)
        records.append(record)
    return records
