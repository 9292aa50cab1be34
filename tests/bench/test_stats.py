"""Statistics on samples whose answers are known (tables of Student's t, sums done by hand)."""

from __future__ import annotations

import math
import random

import pytest

from minisgl.bench.stats import coefficient_of_variation, mean_interval, paired_difference, summary, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 1, 12.7062), (0.975, 4, 2.77645), (0.975, 9, 2.26216), (0.95, 30, 1.69726), (0.995, 5, 4.03214),
     (0.975, 1000, 1.96234), (0.025, 4, -2.77645), (0.5, 3, 0.0)],
)  # fmt: skip
def test_t_quantiles_of_the_table(probability: float, freedom: int, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_an_interval_by_hand() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])  # mean 3, s = sqrt(2.5)
    half = 2.7764451 * math.sqrt(2.5 / 5)
    assert (found.estimate, found.low, found.high) == pytest.approx((3, 3 - half, 3 + half))


def test_single_sample_has_infinite_bounds() -> None:
    found = paired_difference([1.0], [2.0])
    assert found.difference.low == -math.inf and not found.difference.excludes_zero


def test_the_interval_covers_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = sum(
        found.low <= 7.0 <= found.high
        for found in (mean_interval([rng.gauss(7.0, 3.0) for _ in range(5)], 0.9) for _ in range(1000))
    )
    assert 870 <= hits <= 930


def test_a_planted_difference_is_found_under_drift() -> None:
    """Pairs cancel what changes over time, which is larger than the difference."""
    rng = random.Random(2)
    drift = [100 + 20 * i for i in range(10)]
    a = [d * rng.uniform(0.99, 1.01) for d in drift]
    b = [1.1 * d * rng.uniform(0.99, 1.01) for d in drift]
    found = paired_difference(a, b)
    assert found.ratio is not None
    assert found.ratio.low < 0.1 < found.ratio.high and found.ratio.excludes_zero
    assert found.ratio.high - found.ratio.low < 0.03


def test_equal_variants_show_a_difference_as_rarely_as_it_says() -> None:
    rng = random.Random(3)
    alarms = 0
    for _ in range(400):
        a, b = ([rng.gauss(50, 2) for _ in range(6)] for _ in range(2))
        alarms += paired_difference(a, b).difference.excludes_zero
    assert 8 <= alarms <= 36  # 20 of 400 at 95 %


def test_samples_at_zero_have_no_ratio() -> None:
    assert paired_difference([0.0, 1.0], [1.0, 1.0]).ratio is None


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0])])
def test_pairs_must_be_pairs(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        paired_difference(a, b)


def test_variation() -> None:
    assert coefficient_of_variation([9.0, 10.0, 11.0]) == pytest.approx(0.1)
    assert coefficient_of_variation([-1.0, 1.0]) == math.inf
    with pytest.raises(ValueError, match="two"):
        coefficient_of_variation([1.0])


def test_summary() -> None:
    found = summary(list(range(101)))
    assert list(found) == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert list(found.values()) == [50, 50, 90, 95, 99, 100]
    assert math.isnan(summary([])["p99"])
