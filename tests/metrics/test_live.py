"""Figures of a live server, by a clock that the test holds."""

from __future__ import annotations

import msgspec
import pytest

from minisgl.message import EngineStats, MeterReading
from minisgl.metrics.live import LiveFigures
from minisgl.metrics.server_metrics import Metrics

START = EngineStats(1, 2, 100, 40, 30, 20, 10, 3, 1000, 500, 50)


def meters(seconds: float) -> dict[str, MeterReading]:
    return {name: MeterReading(1, seconds, 0.0, 0.0) for name in ("schedule", "launch", "wait", "commit", "send")}


class Case:
    def __init__(self) -> None:
        self.now = 10.0
        self.stats = msgspec.structs.replace(START, meters=meters(1.0))
        self.metrics = Metrics(lambda: self.stats, lambda: None, lambda: True)
        self.figures = LiveFigures(self.metrics, lambda: self.stats, lambda: self.now)

    def look(self) -> dict[str, object]:
        return self.figures.look({"model": "m"})


def test_rates_and_means_are_of_the_interval() -> None:
    case = Case()
    first = case.look()
    assert set(first["rates"].values()) == set(first["step"].values()) == {None}  # type: ignore[attr-defined]
    case.now += 2
    case.metrics.accepted(4)
    case.metrics.tokens(6, 0.0, None, 0.25)
    case.stats = msgspec.structs.replace(
        START,
        num_prompt_tokens_total=1100,
        num_cached_tokens_total=525,
        num_steps_total=54,
        num_retracted_total=5,
        meters=meters(1.002),
    )
    second = case.look()
    assert second["interval_s"] == 2.0 and second["hit_rate"] == 0.25 and second["retractions"] == 2
    assert second["rates"] == {
        "prompt_tokens": 50.0,
        "cached_tokens": 12.5,
        "generated_tokens": 3.0,
        "requests": 2.0,
        "steps": 2.0,
    }
    expected = {"schedule": 0.5, "forward": 1.0, "commit": 0.5, "send": 0.5}
    assert second["step"] == pytest.approx(expected)
    assert second["ttft_s"]["count"] == 1 and 0.1 < second["ttft_s"]["p50"] <= 0.25  # type: ignore[index]
    assert second["itl_s"] == {"count": 0, "p50": None, "p90": None, "p99": None}


def test_percentiles_forget_what_is_older_than_the_window() -> None:
    case = Case()
    case.look()
    case.metrics.tokens(1, 0.0, None, 0.25)
    counts = []
    for _ in range(14):
        case.now += 1
        counts.append(case.look()["ttft_s"]["count"])  # type: ignore[index]
    assert counts[0] == 1 and counts[-1] == 0


def test_an_engine_that_counts_anew_has_no_negative_rates() -> None:
    case = Case()
    case.look()
    case.now += 1
    case.stats = EngineStats(*[0] * 11)
    found = case.look()
    assert set(found["rates"].values()) == {0.0}  # type: ignore[attr-defined]
    assert found["retractions"] == 0 and found["hit_rate"] is None and set(found["step"].values()) == {None}  # type: ignore[attr-defined]


def test_live_figures_exist_without_an_engine() -> None:
    metrics = Metrics(lambda: None, lambda: None, lambda: False)
    found = LiveFigures(metrics, lambda: None).look({})
    assert found["kv"]["pages"] == 0
