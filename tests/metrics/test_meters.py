"""Meters and collections: they count what happened, and only that."""

from __future__ import annotations

import gc

import pytest

from minisgl.metrics import meters
from minisgl.metrics.meters import GcWatch, Meter, Meters, cpu_seconds, resident_bytes


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


def test_the_most_of_something_outlives_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
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
