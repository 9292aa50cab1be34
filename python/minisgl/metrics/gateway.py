"""The gateway's counts, and their sums with the Python server's counts.

Invariants: a metric has one value, whichever front end answered; which one did is a metric of its own.
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
"""Label of all routes that only the Python server handles."""


class HistogramReading(TypedDict):
    counts: list[int]  # by bucket of the histogram of the same name, the last above all bounds; empty at first
    sum: float


class MeterSums(TypedDict):
    count: int
    total_s: float
    longest_s: float
    recent_s: float


class CacheReading(TypedDict):
    """Counters of the cache of encoded texts (those between special tokens)."""

    hits: int
    misses: int
    hit_bytes: int  # bytes of text that was not encoded again
    bytes: int  # size of the cache


class PeakReading(TypedDict):
    recent: int  # of the last 10 to 20 s
    most: int


class Readings(TypedDict):
    """The gateway's counters since its start; `num_open`, `num_waiting...` and `num_live` are current values."""

    num_open: int  # requests that it is answering
    num_waiting: int  # choices of these without a row
    num_waiting_tokens: int
    num_accepted: int
    num_finished: dict[str, int]  # by finish reason
    num_generated: int
    num_live: int  # choices that the engine computes
    keys: list[KeyReading]  # by index of the key
    requests: list[tuple[str, str, int]]  # route, reason to forward it ("": answered here), count
    most: dict[str, PeakReading]  # peaks of choices in_flight and queued (without a row)
    cache: CacheReading
    histograms: dict[str, HistogramReading]
    meters: dict[str, MeterSums]


def families(readings: Readings | None) -> Iterable[Metric]:
    """Yield the families that only a gateway has; without samples if there is none."""
    cache, requests = (None, []) if readings is None else (readings["cache"], readings["requests"])
    did = [("passed_on" if reason else "answered", route, reason, count) for route, reason, count in requests]
    texts = [] if cache is None else [("hit", cache["hits"]), ("miss", cache["misses"])]
    saved, size = ([], []) if cache is None else ([(cache["hit_bytes"],)], [(cache["bytes"],)])
    yield family(Counter, "gateway_requests", "requests by what the gateway did", did, "outcome", "route", "reason")
    yield family(Counter, "encode_cache_texts", "lookups in the cache of encoded texts", texts, "outcome")
    yield family(Counter, "encode_cache_hit_bytes", "bytes of text that was cached", saved)
    yield family(Gauge, "encode_cache_bytes", "bytes of the cache of encoded texts", size)


def shown(readings: Readings) -> dict[str, Any]:
    """Return the gateway's part of /stats; `answered` and `passed_on` cover the routes that the gateway has."""
    routes: dict[str, dict[str, int]] = {}
    for route, reason, count in readings["requests"]:
        routes.setdefault(route, {})[reason or "answered"] = count
    own = [of_route for route, of_route in routes.items() if route != OTHER]
    answered = sum(of_route.get("answered", 0) for of_route in own)
    return {
        "num_open": readings["num_open"],
        "answered": answered,
        "passed_on": sum(sum(of_route.values()) for of_route in own) - answered,
        "routes": routes,
        "cache": readings["cache"],
    }


def both(meters: Mapping[str, MeterReading], more: Mapping[str, MeterSums]) -> dict[str, MeterReading]:
    """Return the Python server's meters with the gateway's meters of the same names added."""
    return {**meters, **{name: added(meters[name], MeterReading(**sums)) for name, sums in more.items()}}


def higher(here: Mapping[str, int], there: PeakReading | None) -> dict[str, int]:
    """Combine the peaks of both front ends: the maximum of either alone, or of both together when it was read."""
    if there is None:
        return dict(here)
    return {
        "now": here["now"],
        "recent": max(here["recent"], there["recent"]),
        "most": max(here["most"], there["most"]),
    }
