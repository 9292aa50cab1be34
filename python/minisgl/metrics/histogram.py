"""A fast histogram: counting a value costs a search among few bounds; the client library takes microseconds.

Invariants: it exposes what Prometheus' own would: cumulative buckets, a sum, a count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """A histogram with buckets up to the ascending `bounds`, and one more for values above the last bound."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count an observed `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def counts(self, more: Sequence[int] = ()) -> list[int]:
        """Return the counts by bucket, the last above all bounds, with the gateway's counts `more` added if given."""
        return [here + there for here, there in zip(self._counts, more or [0] * len(self._counts), strict=True)]

    def collect(self, counts: Sequence[int] = (), sum: float = 0.0) -> HistogramMetricFamily:
        """Return the Prometheus family, with the gateway's `counts` by bucket and its `sum` added."""
        total, buckets = 0, []
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        for bound, count in zip(bounds, self.counts(counts), strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric((), buckets, self._sum + sum)
        return family


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the percentile `share` (0 to 100) of a histogram, interpolated within its bucket, or the last bound if it
    lies above. None if there are no values."""
    wanted, seen, lower = sum(counts) * share / 100, 0, 0.0
    if not wanted:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= wanted:
            return lower + (bound - lower) * (wanted - seen) / count
        seen, lower = seen + count, bound
    return bounds[-1]
