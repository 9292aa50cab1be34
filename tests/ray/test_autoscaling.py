"""How many replicas a load wants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from minisgl.ray.autoscaling import KV, QUEUED, Policy, wanted


@pytest.mark.parametrize(
    ("current", "queued", "kv", "expected"),
    [
        (1, [0], [0.0], 1),
        (0, [], [], 1),
        (1, [1000], [0.1], 1),
        (1, [1001], [0.1], 2),
        (2, [3000, 2000], [0.5, 0.5], 5),
        (1, [0], [0.9], 2),  # of 0.8: one is not enough
        (4, [0, 0, 0, 0], [0.4, 0.4, 0.4, 0.4], 2),
        (2, [0, 0], [0.8, 0.8], 2),  # just right
        (3, [0, 0, 0], [0.0, 0.0, 0.0], 1),
    ],
)
def test_wanted(current: int, queued: list[float], kv: list[float], expected: int) -> None:
    found = wanted(current, dict(enumerate(queued)), dict(enumerate(kv)), queued_tokens=1000, kv_use=0.8)
    assert found == expected


@dataclass
class Context:
    current_num_replicas: int = 1
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


def test_the_policy_reads_what_replicas_report() -> None:
    policy = Policy(queued_tokens=1000, kv_use=0.8)
    context: Any = Context(2, {QUEUED: {"a": 2500.0, "b": 0.0}, KV: {"a": 0.2, "b": 0.1}})
    assert policy(context) == (3, {})
    assert policy(Context(2, {})) == (1, {})
    assert policy(Context(2, None)) == (1, {})
