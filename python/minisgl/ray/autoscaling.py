"""The autoscaling policy: how many replicas a load needs, by queued tokens and used KV pages, as the replicas report
them.

Serve's own policy counts requests. But a request has ten tokens or a hundred thousand; requests wait for the prompts
before them, and a full pool makes a server retract.
Invariants: pure arithmetic; a constant load gives a constant count; a new, empty replica does not change the count; a
replica that reports nothing (on a machine that is too busy) does not count as empty, and no replica is removed
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

QUEUED = "queued_tokens"
KV = "kv_use"


def wanted(
    current: int, queued: Mapping[Any, float], kv: Mapping[Any, float], queued_tokens: int, kv_use: float
) -> int:
    """Return the number of replicas that the load needs. By replica, `queued` is the number of queued prompt tokens and
    `kv` the fraction of the KV pool in use; `queued_tokens` and `kv_use` are the targets of each."""
    for_queue = math.ceil(sum(queued.values()) / queued_tokens)
    for_kv = math.ceil(sum(kv.values()) / kv_use - 1e-9)  # pools of equal size
    return max(1, for_queue, for_kv, 1 if current == 0 else 0)


class Policy:
    """A policy for Serve, which calls it with its context. Returns the number of replicas and an empty state."""

    def __init__(self, queued_tokens: int, kv_use: float) -> None:
        self._queued_tokens = queued_tokens
        self._kv_use = kv_use

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        count = wanted(
            context.current_num_replicas,
            metrics.get(QUEUED, {}),
            metrics.get(KV, {}),
            self._queued_tokens,
            self._kv_use,
        )
        is_silent = any(one not in metrics.get(KV, {}) for one in context.running_replicas)
        return max(count, context.target_num_replicas if is_silent else 0), {}
