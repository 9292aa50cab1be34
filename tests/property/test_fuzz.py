"""The scheduler under random load: texts as if each request were alone, nothing leaks, every request ends once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.scheduler.api import Stats
from tests.helpers.property import Factory, draw_from, make_scenario, run

NUM_SEEDS, NUM_SEEDS_SLOW = 75, 2_500


def runs(seeds: Iterable[int], control_plane: Factory, states: bool = False) -> Iterator[Stats]:
    """The counts at the end of each scenario; a failure names its seed."""
    for seed in seeds:
        try:
            yield run(make_scenario(draw_from(seed), states=states), control_plane).plane.stats()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_seeded_scenarios_give_exact_tokens(control_plane: Factory) -> None:
    retracted = loaded = 0
    for stats in runs(range(NUM_SEEDS), control_plane):
        retracted += stats.num_retracted_total
        loaded += stats.num_loaded_pages_total
    assert retracted, "the pools of these scenarios are too large to test retraction"
    assert loaded > 50, "these runs load too little"


def test_seeded_scenarios_with_states_give_exact_tokens(control_plane: Factory) -> None:
    """A state that is saved, kept, found or copied wrongly changes a text."""
    found = again = saved = 0
    for stats in runs(range(NUM_SEEDS), control_plane, states=True):
        found += stats.num_cached_tokens_total
        again += stats.num_computed_again_total
        saved += stats.num_saved_total
    assert found > 500 and again > 50 and saved > 500, "these runs save, find or lose too little"


def test_a_pin_whose_last_page_made_room_for_a_state(control_plane: Factory) -> None:
    """The first that 150 scenarios did not show: it was to be locked after the state was saved."""
    run(make_scenario(draw_from(224), states=True), control_plane)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
def test_many_more_seeded_scenarios_give_exact_tokens(control_plane: Factory, times: int, states: bool) -> None:
    """More scenarios show more: a state that was saved on a node that had gone came after more than 300."""
    for _ in runs(range(NUM_SEEDS, NUM_SEEDS + times * NUM_SEEDS_SLOW), control_plane, states):
        pass


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_scenarios_drawn_by_hypothesis_give_exact_tokens(control_plane: Factory, data: st.DataObject) -> None:
    """The same scenarios drawn by hypothesis: a failure comes back small."""
    run(make_scenario(lambda low, high: data.draw(st.integers(low, high))), control_plane)
