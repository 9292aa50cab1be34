"""Histograms, against those of the client library."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import Histogram as TheirHistogram

from minisgl.metrics.histogram import Histogram, percentile


@pytest.mark.parametrize(
    "values", [[], [0.001, 0.0011, 7, 1e9, 0], list(np.random.default_rng(0).exponential(0.2, 500))]
)
def test_a_histogram_is_that_of_the_client_library(values: list[float]) -> None:
    bounds = (0.001, 0.1, 1.0, 300.0)
    ours = Histogram("h_seconds", "text", bounds)
    theirs = TheirHistogram("h_seconds", "text", registry=None, buckets=bounds)
    for value in values:
        ours.observe(value)
        theirs.observe(value)

    def samples(source: object) -> dict[tuple[str, ...], float]:
        family = source.collect()  # type: ignore[attr-defined]
        family = family if hasattr(family, "samples") else next(iter(family))
        return {
            (one.name, *one.labels.values()): one.value for one in family.samples if not one.name.endswith("_created")
        }

    found, expected = samples(ours), samples(theirs)
    assert found.pop(("h_seconds_sum",)) == pytest.approx(expected.pop(("h_seconds_sum",)))
    assert found == expected


def test_several_at_once() -> None:
    one, many = (Histogram("h", "text", (1.0, 2.0)) for _ in range(2))
    for _ in range(3):
        one.observe(1.5)
    many.observe(1.5, 3)
    assert one.collect() == many.collect()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 50, None),
        ([4, 0, 0], 50, 0.5),
        ([1, 1, 0], 90, 1.0 + 2.0 * 0.8),
        ([0, 0, 3], 50, 3.0),
        ([0, 2, 0], 100, 3.0),
    ],
)
def test_a_percentile_lies_within_its_bucket(counts: list[int], share: int, expected: float | None) -> None:
    assert percentile((1.0, 3.0), counts, share) == (expected if expected is None else pytest.approx(expected))
