"""How durations are spread: counts by buckets that are an eighth of an octave wide, from nanoseconds to hours, so that
a percentile is right within 7 %.

Invariants: counting costs a few hundred nanoseconds, whatever was counted before; only buckets that hold something are
kept and sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minisgl.message import MeterReading
from minisgl.metrics.meters import Meter

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily

PERCENTILES = (50, 90, 95, 99)
FIRST_BOUND, LAST_BOUND = 10, 33  # of what Prometheus gets, as powers of two in ns: 1 us to 8.6 s


class SpreadMeter(Meter):
    """A meter that knows percentiles too."""

    __slots__ = ("_counts",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._counts: dict[int, int] = {}

    def add(self, ns: int, count: int = 1) -> None:
        super().add(ns, count)
        index = bucket(ns)
        self._counts[index] = self._counts.get(index, 0) + count

    def reset(self) -> None:
        super().reset()
        self._counts.clear()

    def reading(self) -> MeterReading:
        found = super().reading()
        return MeterReading(found.count, found.total_s, found.longest_s, found.recent_s, dict(self._counts))


def bucket(ns: int) -> int:
    """The bucket of a duration: single nanoseconds up to 16, then eight to each doubling."""
    shift = max(0, ns.bit_length() - 4)
    return (shift << 3) + (ns >> shift)


def lower_ns(index: int) -> int:
    """The least duration of a bucket; it ends where the next begins."""
    return index if index < 16 else ((index & 7) + 8) << ((index >> 3) - 1)


def percentiles(spread: Mapping[int, int], longest_s: float, shares: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """By names like `p95_s`: the middle of the bucket that it falls into, in seconds. Empty without durations."""
    found, seen, total = dict[str, float](), 0, sum(spread.values())
    left = list(shares)
    for index in sorted(spread):
        seen += spread[index]
        while left and 100 * seen >= left[0] * total:
            middle = (lower_ns(index) + lower_ns(index + 1)) / 2e9
            found[f"p{left.pop(0)}_s"] = min(middle, longest_s)
    return found


def histogram(name: str, text: str, reading: MeterReading | None) -> Iterable[HistogramMetricFamily]:
    """The family, without samples if there is no reading; bounds are powers of two, where buckets end exactly."""
    from prometheus_client.core import HistogramMetricFamily  # the engine process needs none

    family = HistogramMetricFamily(name, text)
    if reading is not None:
        total, buckets, counts = 0, [], sorted(reading.spread.items(), reverse=True)
        for power in range(FIRST_BOUND, LAST_BOUND + 1):
            while counts and lower_ns(counts[-1][0]) < 1 << power:
                total += counts.pop()[1]
            buckets.append((repr((1 << power) / 1e9), float(total)))
        family.add_metric((), [*buckets, ("+Inf", float(reading.count))], reading.total_s)
    yield family
