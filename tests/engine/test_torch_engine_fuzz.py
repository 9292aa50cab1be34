"""The torch engine under random load on a device that is never earlier than it must be: the answers of one that runs
each job when it is queued."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.engine.launched_step import EngineDeadError
from tests.helpers.device_fuzz import make_scenario, run
from tests.helpers.property import draw_from

NUM_SEEDS, NUM_SEEDS_SLOW = 40, 300
BROUGHT_ABOUT = {"retracted", "cached", "aborted", "failed", "in graphs", "sampled", "masked", "drafted"}


def run_seeds(first: int, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found.update(run(make_scenario(draw_from(seed))))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    for rare in ("near ties", "spread"):
        assert found.pop(rare, 0) <= max(1, count / 200), f"so many {rare} are no chance"
    return found


def test_seeded() -> None:
    found = run_seeds(0, NUM_SEEDS)
    assert {name for name, times in found.items() if times} == BROUGHT_ABOUT, "these scenarios test too little"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_seeded_long(times: int) -> None:
    print(dict(run_seeds(1_000_000, times * NUM_SEEDS_SLOW)))


@given(data=st.data())
@settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_shrinking(data: st.DataObject) -> None:
    """The same scenarios drawn by hypothesis: a failure comes back small."""
    run(make_scenario(lambda low, high: data.draw(st.integers(low, high))))


def test_fuzzer_detects_a_device_without_ordering() -> None:
    """Of twenty scenarios, most differ when no queue goes after any mark."""
    noticed = 0
    for seed in range(20):
        try:
            run(make_scenario(draw_from(seed)), heed=False)
        except (AssertionError, RuntimeError, IndexError, ValueError, EngineDeadError):
            noticed += 1
    assert noticed >= 10
