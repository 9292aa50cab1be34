"""The Rust scheduler beside the Python reference: the same events give the same plans, bit for bit."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.scheduler.api import Stats, part_failures
from minisgl.scheduler.policies import PART_NAMES
from tests.helpers.parity import Divergence, run

STEPS = 250  # of one run
PARTS_IN_RUST = [
    "rust_parts:" + ",".join(names) for count in (1, 2, 3) for names in itertools.combinations(PART_NAMES, count)
]


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


@pytest.mark.parametrize("backend", PARTS_IN_RUST)
def test_any_parts_in_rust(backend: str) -> None:
    cached = sum(check_seed(seed, backend).num_cached_tokens_total for seed in range(80, 88))
    assert cached, "the runs are too easy"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", PARTS_IN_RUST)
def test_any_parts_in_rust_long(backend: str, times: int) -> None:
    for seed in range(2_000_000, 2_000_000 + times * 100):
        check_seed(seed, backend)


def check_seed(seed: int, backend: str = "rust_hotpath") -> Stats:
    try:
        plane = run(random.Random(seed).randint, STEPS, backend).theirs
    except Divergence as error:
        raise AssertionError(f"{backend}, seed {seed}: {error}") from error
    assert not part_failures(plane), "a part failed, and its twin was compared"
    return plane.stats()  # type: ignore[no-any-return]


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
