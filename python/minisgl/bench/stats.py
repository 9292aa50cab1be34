"""Statistics of repeated measurements: summaries, the order of variants, and paired differences with a confidence
interval. Every benchmark that compares uses them.

The interval is Student's t over the pairs: exact for normal differences, good from about five pairs on for means of
many requests, and honest about few pairs (it becomes wide; a bootstrap of few pairs becomes too narrow).
Invariants: no randomness; the same samples give the same figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

PERCENTILES = ("p50", "p90", "p95", "p99")
SUMMARY = ("mean", *PERCENTILES, "max")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its confidence interval, in the samples' unit. The bounds of a single sample are infinite."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of `b` from `a` over pairs. `ratio` is the geometric mean of b / a minus 1, with the interval of
    the mean of its logarithms; None unless all samples are above 0. `mean_a` and `mean_b` are geometric means if there
    is a ratio, else arithmetic ones, so that they match the shown figure."""

    num_pairs: int
    median_a: float
    median_b: float
    difference: Interval
    ratio: Interval | None
    confidence: float
    mean_a: float
    mean_b: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Return `+12.3 % [+1.0, +20.1]`, or the plain difference if a sample is 0; one pair has no interval."""
        shown, scale, unit = (self.ratio, 100.0, " %") if self.ratio else (self.difference, 1.0, "")
        interval = f" [{scale * shown.low:+.1f}, {scale * shown.high:+.1f}]" if self.num_pairs > 1 else ""
        return f"{scale * shown.estimate:+.1f}{unit}{interval}"


def summary(samples: Sequence[float] | npt.NDArray[np.floating[Any]]) -> dict[str, float]:
    """Return mean, p50, p90, p95, p99 and max of samples; all NaN if there are none."""
    if not len(samples):
        return dict.fromkeys(SUMMARY, math.nan)
    values = np.asarray(samples, float)
    of_all = np.percentile(values, [int(name[1:]) for name in PERCENTILES]).tolist()
    return {"mean": float(values.mean()), **dict(zip(PERCENTILES, of_all, strict=True)), "max": float(values.max())}


def coefficient_of_variation(samples: Sequence[float]) -> float:
    """Return the sample standard deviation over the mean, infinite for a mean of 0. Needs two samples or more."""
    if len(samples) < 2:
        raise ValueError("samples: at least two are needed for a variation")
    mean = statistics.fmean(samples)
    return statistics.stdev(samples) / abs(mean) if mean else math.inf


def mean_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean with Student's t interval, mean +- t * s / sqrt(n). Raises `ValueError` without samples."""
    if not samples:
        raise ValueError("samples: there is none")
    mean = statistics.fmean(samples)
    if len(samples) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = t_quantile(0.5 + confidence / 2, len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)


def geometric_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the geometric mean with the interval of the logarithms' mean. All samples must be above 0."""
    logs = mean_interval([math.log(value) for value in samples], confidence)
    return Interval(math.exp(logs.estimate), math.exp(logs.low), _expm1(logs.high) + 1)


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Compare `b[i]` with `a[i]`, measured one after the other. Raises `ValueError` for unequal or empty lists."""
    if len(a) != len(b) or not a:
        raise ValueError(f"pairs: {len(a)} and {len(b)} samples: must be as many, at least one")
    ratio = None
    if min(*a, *b) > 0:
        logs = mean_interval([math.log(y / x) for x, y in zip(a, b, strict=True)], confidence)
        ratio = Interval(*(_expm1(value) for value in (logs.estimate, logs.low, logs.high)))
    difference = mean_interval([y - x for x, y in zip(a, b, strict=True)], confidence)
    mean = statistics.fmean if ratio is None else statistics.geometric_mean
    medians = statistics.median(a), statistics.median(b)
    return PairedDifference(len(a), *medians, difference, ratio, confidence, mean(a), mean(b))


def there_and_back(names: Sequence[T], number: int) -> Sequence[T]:
    """Return the order of round `number`: every other one is reversed, so that a drift affects all alike."""
    return names if number % 2 == 0 else names[::-1]


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, variant) in the order of measuring."""
    return ((number, name) for number in range(rounds) for name in there_and_back(names, number))


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """Return the results of `measure` by variant, one per round."""
    samples: dict[str, list[T]] = {name: [] for name in names}
    for _, name in turns(names, rounds):
        samples[name].append(measure(name))
    return samples


def paired_figures(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]], confidence: float = 0.95
) -> dict[str, PairedDifference]:
    """Return the `paired_difference` of each figure that all samples have."""
    names = [name for name in first[0] if all(name in one for one in (*first, *second))]
    return {
        name: paired_difference([one[name] for one in first], [one[name] for one in second], confidence)
        for name in names
    }


def _expm1(value: float) -> float:
    try:
        return math.expm1(value)
    except OverflowError:
        return math.inf


def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees at `probability`, strictly between 0 and 1."""
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(f"t quantile: {probability}, {freedom}: must be within (0, 1), and at least 1")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _t_probability(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_probability(t: float, freedom: int) -> float:
    """Return P(T <= t) for t >= 0. With t = sqrt(n) tan(x) the density becomes c * cos(x)^(n - 1), c the density's
    factor times sqrt(n); it is integrated by Simpson's rule, whose error is far below 1e-9 with these steps."""
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    xs = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 401)
    ys = np.cos(xs) ** (freedom - 1)
    area = (ys[0] + ys[-1] + 4 * ys[1:-1:2].sum() + 2 * ys[2:-1:2].sum()) * (xs[1] - xs[0]) / 3
    return 0.5 + factor * float(area)
