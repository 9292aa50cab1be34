"""The control plane decides what it decided when `decisions.json` was recorded.

A refactor must leave every digest as it is. A change of policy records them anew and says why in its commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from tests.replay.record import DECISIONS, SCENARIOS, decisions

Factory = Callable[[ControlPlaneConfig], ControlPlane]


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_the_recorded_ones(name: str, control_plane: Factory) -> None:
    recorded = json.loads(DECISIONS.read_text())[name]
    plane = control_plane(SCENARIOS[name].control_plane_config())
    for call, (now, then) in enumerate(zip(decisions(SCENARIOS[name], plane), recorded, strict=True)):
        assert now == then, f"call {call} of scenario {name!r} is the first that differs"


def test_scenarios_reach_what_they_are_for(control_plane: Factory) -> None:
    def stats_after(name: str) -> tuple[int, int]:
        plane = control_plane(SCENARIOS[name].control_plane_config())
        assert list(decisions(SCENARIOS[name], plane))
        plane.check()
        return plane.stats().num_retracted_total, plane.stats().num_cached_tokens_total

    assert stats_after("retraction")[0] > 0
    assert stats_after("shared_prefix")[1] > 0
    assert stats_after("naive")[1] == 0


def test_all_recorded_scenarios_are_replayed() -> None:
    assert list(json.loads(DECISIONS.read_text())) == list(SCENARIOS)
