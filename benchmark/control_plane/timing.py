"""Median, minimum and upper percentiles of times, measured with the garbage collector off."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable


def measured(run: Callable[[], list[float]]) -> dict[str, float]:
    """Of what `run` returns, in its unit."""
    gc.collect()
    gc.disable()
    try:
        times = sorted(run())
    finally:
        gc.enable()
    return {
        "median": round(statistics.median(times), 3),
        "min": round(times[0], 3),
        **{f"p{share}": round(times[len(times) * share // 100], 3) for share in (90, 95, 99)},
    }
