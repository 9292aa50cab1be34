"""The scheduler under random load: texts as if each request were alone, nothing leaks, every request ends once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.property import Factory, draw_from, make_scenario, run

NUM_SEEDS, NUM_SEEDS_SLOW = 150, 5_000


def test_seeded(control_plane: Factory) -> None:
    retracted = 0
    for seed in range(NUM_SEEDS):
        try:
            retracted += run(make_scenario(draw_from(seed)), control_plane).plane.stats().num_retracted_total
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert retracted, "the pools of these scenarios are too large to test retraction"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_seeded_long(control_plane: Factory, times: int) -> None:
    for seed in range(NUM_SEEDS, NUM_SEEDS + times * NUM_SEEDS_SLOW):
        try:
            run(make_scenario(draw_from(seed)), control_plane)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_shrinking(control_plane: Factory, data: st.DataObject) -> None:
    """The same scenarios drawn by hypothesis: a failure comes back small."""
    run(make_scenario(lambda low, high: data.draw(st.integers(low, high))), control_plane)


def test_states(control_plane: Factory) -> None:
    """A state that is saved, kept, found or copied wrongly changes a text."""
    found = again = saved = 0
    for seed in range(NUM_SEEDS):
        try:
            stats = run(make_scenario(draw_from(seed), states=True), control_plane).plane.stats()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        found += stats.num_cached_tokens_total
        again += stats.num_computed_again_total
        saved += stats.num_saved_total
    assert found > 1000 and again > 100 and saved > 1000, "these runs save, find or lose too little"
