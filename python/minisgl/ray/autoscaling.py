"""How many replicas a load wants: by tokens that wait and by KV pages in use, as replicas report them of their servers.

Serve's own policy counts requests. But a request is ten tokens or a hundred thousand; what makes people wait is the
prompts before theirs, and what makes a server retract is a full pool.

Invariants: pure arithmetic; a load that stays the same asks for the same number again and again; nothing is asked for
that one replica could not change (an empty server that has just come counts as one); a replica that reports nothing, as
on a machine that is too busy, is not an empty one: none goes meanwhile.
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
    """`queued`: prompt tokens that wait, `kv`: part of the pool that running requests hold, by replica."""
    for_queue = math.ceil(sum(queued.values()) / queued_tokens)
    for_kv = math.ceil(sum(kv.values()) / kv_use - 1e-9)  # pools of equal size
    return max(1, for_queue, for_kv, 1 if current == 0 else 0)


class Policy:
    """Serve's interface of a policy: called with its context, answers with a number and the state to keep."""

    def __init__(self, queued_tokens: int, kv_use: float) -> None:
        self._queued_tokens = queued_tokens
        self._kv_use = kv_use

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        found = wanted(
            context.current_num_replicas,
            metrics.get(QUEUED, {}),
            metrics.get(KV, {}),
            self._queued_tokens,
            self._kv_use,
        )
        is_silent = any(one not in metrics.get(KV, {}) for one in context.running_replicas)
        return max(found, context.target_num_replicas if is_silent else 0), {}
