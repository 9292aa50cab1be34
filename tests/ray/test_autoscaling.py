"""How many replicas a load wants."""

from __future__ import annotations

from dataclasses import dataclass
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
    running_replicas: list[str]
    aggregated_metrics: dict[str, dict[str, float]] | None
    target_num_replicas: int = 1

    @property
    def current_num_replicas(self) -> int:
        return len(self.running_replicas)


def test_the_policy_reads_what_replicas_report() -> None:
    policy = Policy(queued_tokens=1000, kv_use=0.8)
    context: Any = Context(["a", "b"], {QUEUED: {"a": 2500.0, "b": 0.0}, KV: {"a": 0.2, "b": 0.1}})
    assert policy(context) == (3, {})
    assert policy(Context([], {})) == (1, {})
    assert policy(Context([], None)) == (1, {})


def test_a_replica_that_reports_nothing_is_not_an_empty_one() -> None:
    """A machine that is too busy to report would else lose the replicas that are to help it."""
    policy = Policy(queued_tokens=1000, kv_use=0.8)
    assert policy(Context(["a"], {}, target_num_replicas=3)) == (3, {})
    assert policy(Context(["a", "b"], {QUEUED: {"a": 0.0}, KV: {"a": 0.1}}, target_num_replicas=2)) == (2, {})
    assert policy(Context(["a", "b"], {QUEUED: {"a": 4000.0}, KV: {"a": 0.1}}, target_num_replicas=2)) == (4, {})
    assert policy(Context(["a"], {QUEUED: {"a": 0.0}, KV: {"a": 0.1}}, target_num_replicas=3)) == (1, {})
