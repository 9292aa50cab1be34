"""Which field differs first, and whose element it is."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.differences import Difference, PlannedStep, plan_differences
from minisgl.step import Events
from tests.helpers.scheduler import arrival

CONFIG = ControlPlaneConfig(64, 4, 4, 64, 64)
OWNERS = {0: 70, 1: 71, 2: 72}


def planned() -> PlannedStep:
    """Return the first step of three prompts of 5, 6 and 7 tokens."""
    plane = make_control_plane("python", CONFIG)
    events = [arrival(70 + i, list(range(10 * i, 10 * i + 5 + i)), max_tokens=4) for i in range(3)]
    plan = plane.schedule(0, Events(events))
    return PlannedStep(plan, plane.buffers.ring[plan.ring_index])


@pytest.mark.parametrize(
    ("name", "index", "req_id"),
    [("input_ids", 4, 70), ("positions", 5, 71), ("out_loc", 17, 72), ("seq_lens", 1, 71), ("kv_indptr", 3, 72),
     ("sample_rows", 2, 72), ("page_ids", 2, 71), ("page_table_updates", 1, 71), ("assigned_ids", 0, 70)],
)  # fmt: skip
def test_an_element_of_an_array_belongs_to_its_request(name: str, index: int, req_id: int) -> None:
    ours, theirs = planned(), planned()
    assert list(plan_differences(ours, theirs, OWNERS)) == []
    getattr(theirs.entry, name)[index] += 7
    (found,) = plan_differences(ours, theirs, OWNERS)
    assert (found.what, found.index, found.req_id) == (name, index, req_id)
    assert np.any(np.asarray(found.primary) != np.asarray(found.shadow))


def test_a_header_is_told_with_the_first_request_whose_row_differs() -> None:
    ours, theirs = planned(), planned()
    theirs.entry.extend_lens[1] = 5
    theirs.plan.num_tokens = 17
    first, *others = plan_differences(ours, theirs, OWNERS)
    assert first == Difference("plan.num_tokens", 18, 17, None, 71)
    assert [one.what for one in others] == ["input_ids", "positions", "out_loc", "extend_lens"]
    assert (others[0].index, others[0].req_id) == (17, 72)  # the shorter array ends there
