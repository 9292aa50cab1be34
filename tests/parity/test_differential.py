"""The Rust scheduler beside the Python reference: the same events give the same plans, bit for bit."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.scheduler.api import Stats
from tests.helpers.parity import Divergence, run

STEPS = 250  # of one run


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_20_000_steps(first: int) -> None:
    retracted = cached = 0
    for seed in range(first, first + 20):
        stats = check_seed(seed)
        retracted += stats.num_retracted_total
        cached += stats.num_cached_tokens_total
    assert retracted and cached, "the runs are too easy"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_half_a_million_steps(times: int) -> None:
    for seed in range(1_000_000, 1_000_000 + times * 2000):
        check_seed(seed)


def check_seed(seed: int) -> Stats:
    try:
        return run(random.Random(seed).randint, STEPS).theirs.stats()  # type: ignore[no-any-return]
    except Divergence as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_shrinking(data: st.DataObject) -> None:
    """The same runs drawn by hypothesis: a divergence comes back with a minimal list of events."""
    run(lambda low, high: data.draw(st.integers(low, high)), 25)
