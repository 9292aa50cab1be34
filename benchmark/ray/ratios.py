"""One side over another, paired by round.

Invariants: only figures of the same round are divided; a figure that is 0 somewhere has no ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from minisgl.bench.report import number
from minisgl.bench.stats import Interval, geometric_interval, mean_interval

Rounds = Mapping[str, Sequence[float | None]]
"""By side, a figure of each round."""


def ratio(figure: Rounds, over: str, under: str) -> Interval | None:
    """The geometric mean of `over` / `under`, with its 95 % interval. None: it cannot be said."""
    pairs = list(zip(figure[over], figure[under], strict=True))
    if not pairs or not all(a and b and a > 0 and b > 0 for a, b in pairs):
        return None
    return geometric_interval([a / b for a, b in pairs if a and b])


def difference(figure: Rounds, one: str, other: str) -> Interval:
    return mean_interval([(a or 0.0) - (b or 0.0) for a, b in zip(figure[one], figure[other], strict=True)])


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def shown(interval: Interval | None, unit: float = 1.0) -> str:
    """`estimate (low to high)`; without an interval where there was one round."""
    if interval is None:
        return "-"
    low, high = number(unit * interval.low), number(unit * interval.high)
    return number(unit * interval.estimate) + ("" if "-" in (low, high) else f" ({low} to {high})")


def there_and_back(names: Sequence[str], turn: int) -> list[str]:
    """What the machine does over time hits all alike."""
    return list(names) if turn % 2 == 0 else list(reversed(names))
