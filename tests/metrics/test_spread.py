"""How durations are spread: buckets, percentiles, and what Prometheus gets."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.metrics.spread import SpreadMeter, bucket, histogram, lower_ns, percentiles


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
