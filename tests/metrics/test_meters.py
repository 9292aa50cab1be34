"""Meters and collections: they count what happened, and only that."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np
import pytest

from minisgl.metrics import meters
from minisgl.metrics.meters import (
    GcWatch,
    LoopLag,
    Meter,
    Meters,
    SpreadMeter,
    bucket,
    cpu_seconds,
    histogram,
    lower_ns,
    percentiles,
    resident_bytes,
)


def test_a_meter_counts() -> None:
    meter = Meter("m")
    meter.add(2_000_000_000)
    meter.add(5_000_000_000, count=3)
    assert (found := meter.reading()).count == 4 and found.total_s == 7
    assert found.longest_s == found.recent_s == 5


def test_recent_forgets_and_longest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: now)
    found = Meters(("m",))
    found["m"].add(7_000_000_000)
    for expected in (7, 7, 0):  # in its window, in the one after it, then no more
        now += meters.WINDOW_NS
        assert found.readings()["m"].recent_s == expected
        assert found.readings()["m"].longest_s == 7
    found["m"].add(1_000_000_000)
    assert found.readings()["m"].recent_s == 1


def test_recent_peak_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    now, there = 0, 3
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: now)
    peak = meters.Peak(lambda: there)
    peak.see()
    for there, expected in ((2, 3), (1, 3), (1, 2), (0, 1)):  # each window begins with what is there
        now += meters.WINDOW_NS
        assert peak.read() == {"now": there, "recent": expected, "most": 3}


def test_collections_are_watched_until_the_end() -> None:
    meter = Meter("gc")
    watch = GcWatch(meter)
    watch.start()
    gc.collect()
    seen = meter.count
    assert seen >= 1 and meter.total_ns > 0
    watch.stop()
    watch.stop()
    gc.collect()
    assert meter.count == seen


def test_usage_of_this_process() -> None:
    before = cpu_seconds()
    sum(range(300_000))
    assert cpu_seconds() > before
    assert 10 * 2**20 < resident_bytes() < 64 * 2**30


def test_buckets_follow_one_another_without_a_gap() -> None:
    for ns in (*range(2000), *(2**power + more for power in range(11, 50) for more in (-1, 0, 1, 12345))):
        low, high = lower_ns(bucket(ns)), lower_ns(bucket(ns) + 1)
        assert low <= ns < high <= max(low * 9 / 8, low + 1)


def test_percentiles_are_those_of_the_durations() -> None:
    drawn = np.random.default_rng(0).lognormal(10, 1.5, 20_000).astype(int).tolist()
    meter = SpreadMeter("m")
    assert percentiles(meter.reading().spread, 0.0) == {}
    for ns in drawn:
        meter.add(ns)
    reading = meter.reading()
    found = percentiles(reading.spread, reading.longest_s)
    assert list(found) == ["p50_s", "p90_s", "p95_s", "p99_s"]
    assert list(found.values()) == pytest.approx((np.percentile(drawn, [50, 90, 95, 99]) / 1e9).tolist(), rel=0.07)
    assert sum(reading.spread.values()) == reading.count == 20_000 and len(reading.spread) < 200
    meter.reset()
    meter.add(1_000_000, count=4)
    assert set(percentiles(meter.reading().spread, 1e-3).values()) == {1e-3}  # never above the longest


def test_prometheus_gets_the_same_durations_by_powers_of_two() -> None:
    drawn = np.random.default_rng(1).lognormal(10, 2, 2000).astype(int)
    meter = SpreadMeter("m")
    for ns in drawn.tolist():
        meter.add(ns)
    (family,) = histogram("x_seconds", "text", meter.reading())
    values = {one.labels["le"]: one.value for one in family.samples if "le" in one.labels}
    assert values.pop("+Inf") == 2000 and len(values) == 24
    for bound, count in values.items():
        assert count == (drawn < round(float(bound) * 1e9)).sum()
    (empty,) = histogram("x_seconds", "text", None)
    assert empty.samples == []


async def test_a_blocked_event_loop_shows() -> None:
    meter = Meter("pause")
    lag = LoopLag(meter, lambda: True)
    lag.start()
    await asyncio.sleep(0)
    time.sleep(0.08)  # the pause that must be seen
    while meter.reading().longest_s <= 0.06:
        await asyncio.sleep(0)
    lag.stop()
    seen = meter.count
    await asyncio.sleep(0.03)
    assert meter.count == seen
