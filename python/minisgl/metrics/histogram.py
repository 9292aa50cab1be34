"""A histogram that costs a search among few bounds: the client library's costs microseconds, and every token is one.

Invariants: what it exposes is what Prometheus' own would: cumulative buckets, a sum, a count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """`bounds` are the upper ends of the buckets, ascending; what lies beyond the last is counted too."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`value` was seen `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def counts(self, more: Sequence[int] = ()) -> list[int]:
        """By bucket, so far; the last is beyond all bounds. `more`: what was counted elsewhere, if anything was."""
        return [here + there for here, there in zip(self._counts, more or [0] * len(self._counts), strict=True)]

    def collect(self, counts: Sequence[int] = (), sum: float = 0.0) -> HistogramMetricFamily:
        """With what was counted elsewhere, by bucket, and its sum."""
        total, buckets = 0, []
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        for bound, count in zip(bounds, self.counts(counts), strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric((), buckets, self._sum + sum)
        return family


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The quantile of what lies in buckets up to `bounds`, by a straight line within its bucket; beyond the last bound,
    that one. None of nothing."""
    wanted, seen, lower = sum(counts) * share / 100, 0, 0.0
    if not wanted:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= wanted:
            return lower + (bound - lower) * (wanted - seen) / count
        seen, lower = seen + count, bound
    return bounds[-1]
