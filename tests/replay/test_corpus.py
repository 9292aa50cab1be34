"""The schedulers decide what they decided when the corpus was recorded.

A refactor must leave every digest as it is. A change of policy records the corpus anew (`tests/replay/record.py`) and
says why in its commit.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from functools import partial

import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, Stats
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.trace import read_trace, replay
from tests.replay.record import CORPUS, DIGESTS, DIGITS, SCENARIOS, SUFFIX, Scenario, drive, record, shortened

Factory = Callable[[ControlPlaneConfig], ControlPlane]
RECORDED: dict[str, str] = json.loads(DIGESTS.read_text())
MAX_BYTES = 600_000


def difference(name: str, make: Factory) -> str | None:
    """The first call of a recorded trace in which a scheduler decides otherwise."""
    trace = read_trace(CORPUS / (name + SUFFIX))
    recorded = [RECORDED[name][at : at + DIGITS] for at in range(0, len(RECORDED[name]), DIGITS)]
    assert len(recorded) == len(trace.calls)
    found = replay(trace, make(trace.config))
    for call, (now, then) in enumerate(zip(found.digests, recorded, strict=False)):
        if shortened(now) != then:
            return f"trace {name!r}: call {call}, {trace.call_name(call)}, is the first that differs"
    return f"trace {name!r}: {found.error}" if found.error else None


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_the_recorded_ones(name: str, control_plane: Factory) -> None:
    assert difference(name, control_plane) is None


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_with_parts_in_rust_are_the_recorded_ones(name: str) -> None:
    assert difference(name, partial(make_control_plane, "rust_parts")) is None


def test_the_corpus_is_what_the_recorder_makes() -> None:
    assert list(RECORDED) == list(SCENARIOS)
    assert sorted(file.name for file in CORPUS.glob(f"*{SUFFIX}")) == sorted(name + SUFFIX for name in SCENARIOS)
    for name, scenario in SCENARIOS.items():
        assert gzip.decompress((CORPUS / (name + SUFFIX)).read_bytes()) == record(scenario, "rust_hotpath"), name
    assert sum(file.stat().st_size for file in CORPUS.iterdir()) < MAX_BYTES


def test_scenarios_exercise_the_features_in_their_names(control_plane: Factory) -> None:
    for name, scenario in SCENARIOS.items():
        plane = control_plane(scenario.control_plane_config())
        stats = drive(scenario, plane)
        plane.check()
        policy = scenario.control_plane_config().schedule_policy
        if policy != "fcfs":
            other = dataclasses.replace(scenario, config=scenario.config | {"schedule_policy": "fcfs"})
            assert stats != drive(other, control_plane(other.control_plane_config())), f"{name}: nobody went first"
            continue
        retracts = name.split("-")[0] in ("retraction", "seldom_retracted", "background")
        assert retracts == (stats.num_retracted_total > 2), name
        if "namespaces" in name:
            shared = scenario_without_namespaces(scenario, control_plane)
            assert 0 < stats.num_cached_tokens_total < 2 * shared.num_cached_tokens_total / 3, "prefixes were shared"
        if "pins" in name:
            assert stats.num_pinned_pages > 0
        if "limits" in name:
            assert stats.num_free_pages > 32, "the cache is kept small"
        if "shared_prefix" in name:
            assert stats.num_cached_tokens_total > stats.num_prompt_tokens_total / 2, name
        assert (stats.num_drafted_total > stats.num_accepted_total > 20) == ("drafts" in name), name
        if "guessed" in name:
            alone = dataclasses.replace(scenario, guessed=False)
            without = drive(alone, control_plane(alone.control_plane_config()))
            assert without.num_drafted_total < 20 < stats.num_accepted_total, "the texts themselves say little"
        assert (stats.num_loaded_pages_total > 80) == ("stored" in name), name
        if "naive" in name:
            assert stats.num_cached_tokens_total == 0
        if name.split("-")[0] in ("long", "bursty"):
            assert stats.num_free_pages < 4, f"{name}: nothing was evicted"


def scenario_without_namespaces(scenario: Scenario, control_plane: Factory) -> Stats:
    return drive(dataclasses.replace(scenario, num_namespaces=1), control_plane(scenario.control_plane_config()))
