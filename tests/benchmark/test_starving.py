"""`benchmark.starving`: it sees who is overtaken, and stops where that is too often."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from benchmark.starving import Watch, run
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.scheduler.reference.ranking import WINDOWS
from minisgl.step import Arrival


def test_who_waits_longest_is_overtaken_by_those_that_came_later() -> None:
    watch = Watch()
    for req_id in range(5):
        watch.arrive(Arrival(req_id, np.array([1], np.int32), 1, 1, priority=int(req_id == 4)), step=0)
    for step, (req_id, expected) in enumerate([(2, 1), (0, 1), (3, 2), (3, 2), (4, 2), (1, 2)], 1):
        watch.start(req_id, step)
        watch.look()
        assert watch.most_overtaken == expected
    assert watch.longest_wait == 6 and not watch.since and not watch.started


@pytest.mark.parametrize("policy", ["lpm", "srpf"])
def test_nobody_starves_and_a_run_that_says_otherwise_stops(policy: SchedulePolicy) -> None:
    found = run(policy, 12_000, seed=2)
    assert found["steps"] == 12_000 and not found["starved"] and found["failed_forwards"] and found["retractions"]
    assert 30 < found["overtaken_at_most"] <= found["bound"]
    with patch.dict(WINDOWS, {policy: 20}):  # it asks for more than the scheduler promises
        found = run(policy, 12_000, seed=2)
    assert found["starved"] and found["overtaken_at_most"] >= 20 and found["steps"] < 12_000
