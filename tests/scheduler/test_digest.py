"""Digests of plans: what was decided, and nothing else."""

from __future__ import annotations

import pytest

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.digest import output_digest, plan_digest
from minisgl.step import Abort, StepBuffers
from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")

CONFIG = ControlPlaneConfig(64, 4, 8, 64, 256)


def _digests(prompt: list[int], ring_len: int) -> list[int]:
    driver = Driver(buffers=StepBuffers(CONFIG.limits(), ring_len=ring_len))
    digests = []
    for events in ([arrival(1, prompt), arrival(2, prompt)], [], [Abort(1)]):
        driver.schedule(*events)
        digests += [plan_digest(driver.plan, driver.plane.buffers), output_digest(driver.commit())]
    return digests


def test_digests_depend_on_what_was_decided_and_on_nothing_else() -> None:
    first = _digests([1] * 9, 2)
    assert len(set(first)) == 6
    assert all(0 <= digest < 2**64 for digest in first)
    assert _digests([1] * 9, 3) == first, "neither the ring's length nor dead regions count"
    assert _digests([1] * 8 + [2], 2)[0] != first[0]
