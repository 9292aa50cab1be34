"""What the gateway has counted, and how it joins what the Python server counts.

Invariants: a metric is one number, whoever answered; who did is a metric of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from prometheus_client.core import Metric

from minisgl.message import MeterReading
from minisgl.metrics.engines import added
from minisgl.metrics.families import Counter, Gauge, family
from minisgl.metrics.keys import KeyReading

OTHER = "other"
"""The route of requests for what only the Python server has."""


class HistogramReading(TypedDict):
    counts: list[
        int
    ]  # by bucket of the histogram of the same name, the last is beyond all bounds; none before it is told
    sum: float


class MeterSums(TypedDict):
    count: int
    total_s: float
    longest_s: float
    recent_s: float


class CacheReading(TypedDict):
    """Texts between special tokens whose ids are known."""

    hits: int
    misses: int
    hit_bytes: int  # of text that was not encoded again
    bytes: int  # in the cache


class PeakReading(TypedDict):
    recent: int  # of the last 10 to 20 s
    most: int


class Readings(TypedDict):
    """Since the start, but for `num_open`, `num_waiting...` and `num_live`, which are of now."""

    num_open: int  # requests that it is answering by itself
    num_waiting: int  # of those, choices without a row
    num_waiting_tokens: int
    num_accepted: int
    num_finished: dict[str, int]  # by finish reason
    num_generated: int
    num_live: int  # choices that the engine computes
    keys: list[KeyReading]  # by number
    requests: list[tuple[str, str, int]]  # route, why Python answered (empty: the gateway did), how many
    most: dict[str, PeakReading]  # choices in_flight, and queued: without a row
    cache: CacheReading
    histograms: dict[str, HistogramReading]
    meters: dict[str, MeterSums]


def families(found: Readings | None) -> Iterable[Metric]:
    """What only a gateway has; without samples where there is none."""
    cache, requests = (None, []) if found is None else (found["cache"], found["requests"])
    did = [("passed_on" if reason else "answered", route, reason, count) for route, reason, count in requests]
    texts = [] if cache is None else [("hit", cache["hits"]), ("miss", cache["misses"])]
    saved, held = ([], []) if cache is None else ([(cache["hit_bytes"],)], [(cache["bytes"],)])
    yield family(Counter, "gateway_requests", "requests by what the gateway did", did, "outcome", "route", "reason")
    yield family(Counter, "encode_cache_texts", "texts between special tokens that were looked up", texts, "outcome")
    yield family(Counter, "encode_cache_hit_bytes", "text that was not encoded again", saved)
    yield family(Gauge, "encode_cache_bytes", "memory of that cache", held)


def shown(found: Readings) -> dict[str, Any]:
    """What `/stats` has of it. `answered` and `passed_on` are of the routes that the gateway has."""
    routes: dict[str, dict[str, int]] = {}
    for route, reason, count in found["requests"]:
        routes.setdefault(route, {})[reason or "answered"] = count
    own = [of_route for route, of_route in routes.items() if route != OTHER]
    answered = sum(of_route.get("answered", 0) for of_route in own)
    return {
        "num_open": found["num_open"],
        "answered": answered,
        "passed_on": sum(sum(of_route.values()) for of_route in own) - answered,
        "routes": routes,
        "cache": found["cache"],
    }


def both(meters: Mapping[str, MeterReading], more: Mapping[str, MeterSums]) -> dict[str, MeterReading]:
    """Meters of the Python server with those of the same names of the gateway added to them."""
    return {**meters, **{name: added(meters[name], MeterReading(**sums)) for name, sums in more.items()}}


def higher(here: Mapping[str, int], there: PeakReading | None) -> dict[str, int]:
    """A peak of both sides: the most that was seen of either alone, or of both when somebody asked."""
    if there is None:
        return dict(here)
    return {
        "now": here["now"],
        "recent": max(here["recent"], there["recent"]),
        "most": max(here["most"], there["most"]),
    }
