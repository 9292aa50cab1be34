"""Live figures of a server: rates, percentiles and means between two readings of its counters, once a second.

Invariants: no cost unless a client subscribes; clients at the same time get the same figures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.message import EngineStats
from minisgl.metrics.histogram import percentile
from minisgl.metrics.server_metrics import SECONDS, Metrics

WINDOW_S = 10.0
SHARES = (50, 90, 99)
KV = {
    "pages": "num_pages",
    "free": "num_free_pages",
    "cached": "num_evictable_pages",
    "protected": "num_protected_pages",
    "held": "num_held_pages",
    "pinned": "num_pinned_pages",
}
NOTHING = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class LiveFigures:
    """Live figures of a server for its page. Call `look` once a second. `stats` returns the sum over all engines."""

    def __init__(
        self, metrics: Metrics, stats: Callable[[], EngineStats | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._clock = clock
        self._readings: deque[tuple[float, dict[str, Any], EngineStats, dict[str, list[int]]]] = deque()

    def forget(self) -> None:
        """Drop all readings, when the last client has left."""
        self._readings.clear()

    def look(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Read the counters and return the data of a `stats` event. `about`: the fields of /stats but metrics."""
        now, snapshot = self._clock(), self._metrics.snapshot()
        stats, counts = self._stats() or NOTHING, self._metrics.latencies()
        while len(self._readings) > 1 and now - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()
        oldest = self._readings[0] if self._readings else None
        before = self._readings[-1] if self._readings else None
        self._readings.append((now, snapshot, stats, counts))
        interval = 0.0 if before is None else now - before[0]
        prompt, cached = _tokens(stats, NOTHING if oldest is None else oldest[2])
        event: dict[str, Any] = {
            "at_ms": round(time.time() * 1e3, 1),
            "interval_s": round(interval, 3),
            "window_s": WINDOW_S,
            "rates": _rates(snapshot, stats, before, interval),
            "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
        }
        for name, here in counts.items():
            then = [0] * len(here) if oldest is None else oldest[3][name]
            event[f"{name}_s"] = _spread([new - old for new, old in zip(here, then, strict=True)])
        retracted = stats.num_retracted_total
        return event | {
            "kv": {name: getattr(stats, field) for name, field in KV.items()},
            "hit_rate": round(cached / prompt, 4) if prompt > 0 else None,
            "step": _phases(stats, stats if before is None else before[2]),
            "retractions": 0 if before is None else max(0, retracted - before[2].num_retracted_total),
            "retractions_total": retracted,
            "engines": [_engine(one) for one in snapshot["engines"]],
            "pauses": {
                "server_s": snapshot["http"]["meters"]["pause"]["recent_s"],
                "engine_s": stats.meters["pause"].recent_s if "pause" in stats.meters else 0.0,
            },
            "stats": {**about, **snapshot},
        }


def _tokens(now: EngineStats, then: EngineStats) -> tuple[int, int]:
    """Return the prompt tokens of requests admitted between two readings, and how many of them were cached."""
    return (
        now.num_prompt_tokens_total - then.num_prompt_tokens_total,
        now.num_cached_tokens_total - then.num_cached_tokens_total,
    )


def _rates(
    snapshot: Mapping[str, Any], stats: EngineStats, before: tuple[float, Any, EngineStats, Any] | None, seconds: float
) -> dict[str, float | None]:
    names = ("prompt_tokens", "cached_tokens", "generated_tokens", "requests", "steps")
    if before is None or seconds <= 0:
        return dict.fromkeys(names)
    http, then = snapshot["http"], before[1]["http"]
    counted = (
        *_tokens(stats, before[2]),
        http["generated_tokens"] - then["generated_tokens"],
        http["requests_accepted"] - then["requests_accepted"],
        stats.num_steps_total - before[2].num_steps_total,
    )
    return {name: round(max(0, count) / seconds, 2) for name, count in zip(names, counted, strict=True)}


def _spread(counts: Sequence[int]) -> dict[str, float | None]:
    spread: dict[str, float | None] = {"count": sum(counts)}
    for share in SHARES:
        value = percentile(SECONDS, counts, share)
        spread[f"p{share}"] = None if value is None else round(value, 6)
    return spread


def _phases(now: EngineStats, then: EngineStats) -> dict[str, float | None]:
    """Return the mean milliseconds of a step by phase; None if there was no step."""
    steps = now.num_steps_total - then.num_steps_total
    parts = {"schedule": ("schedule",), "forward": ("launch", "wait"), "commit": ("commit",), "send": ("send",)}
    means: dict[str, float | None] = {}
    for name, meters in parts.items():
        spent = sum(_total(now, meter) - _total(then, meter) for meter in meters)
        means[name] = round(max(0.0, spent) * 1e3 / steps, 4) if steps > 0 else None
    return means


def _total(stats: EngineStats, meter: str) -> float:
    return stats.meters[meter].total_s if meter in stats.meters else 0.0


def _engine(view: Mapping[str, Any]) -> dict[str, Any]:
    shown, stats = {name: value for name, value in view.items() if name != "stats"}, view["stats"] or {}
    fields = {"running": "num_running", "waiting": "num_waiting", **KV}
    return shown | {name: stats.get(field, 0) for name, field in fields.items()}
