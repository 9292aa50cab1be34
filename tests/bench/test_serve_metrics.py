"""Figures of `bench serve` from arrays made by hand: each definition by a case that can be worked out on paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from minisgl.bench.load import Measured, Sample
from minisgl.bench.serve_metrics import Slo, figures
from minisgl.bench.serve_report import median_of
from tests.helpers.bench import NAN, result


def of(slo: Slo | None = None, **changes: Any) -> dict[str, Any]:
    return figures(Measured(result(**changes)), slo or Slo())


def test_latencies_count_from_when_a_request_was_due() -> None:
    found = of()
    assert found["ttft_ms"]["max"] == pytest.approx(600)
    assert found["ttft_ms"]["mean"] == pytest.approx(350)
    assert found["e2e_ms"]["max"] == pytest.approx(2600)
    assert found["client"]["lag_ms"]["max"] == pytest.approx(500)


def test_time_per_token_is_without_the_first() -> None:
    assert of()["tpot_ms"]["mean"] == pytest.approx((400 / 4 + 2000 / 10) / 2)


def test_gaps_and_the_longest() -> None:
    found = of()
    assert found["itl_ms"]["p50"] == pytest.approx(200)
    assert found["longest_pause_ms"] == pytest.approx(300)


def test_the_most_in_flight_and_queued() -> None:
    """Failed ones were in flight too; one that was never sent was not."""
    found = of()
    assert (found["max_in_flight"], found["max_queued"]) == (2, 1)
    queue = of(sent=np.array([0.0, 0.05, 0.05]), first=np.array([0.1, 1.6, NAN]), end=np.array([0.6, 3.7, 0.1]))
    assert (queue["max_in_flight"], queue["max_queued"]) == (3, 3)
    assert of(sent=np.array([NAN, NAN, NAN]))["max_in_flight"] == 0
    one_after_the_other = of(sent=np.array([0.0, 0.6, 3.7]), end=np.array([0.6, 3.7, 4.0]))
    assert one_after_the_other["max_in_flight"] == 1
    assert median_of([found, queue, found])["max_queued"] == 3


def test_throughput_is_of_what_succeeded() -> None:
    found = of()
    assert (found["output_tokens"], found["input_tokens"], found["cached_tokens"]) == (16, 300, 50)
    assert found["output_tok_s"] == 4.0
    assert found["total_tok_s"] == 79.0
    assert found["tokens_per_event"] == pytest.approx(16 / 14)
    assert found["client"]["cpu_us_per_token"] == pytest.approx(1000)


def test_a_failed_request_is_counted_with_its_reason_and_is_in_no_latency() -> None:
    found = of()
    assert (found["requests"], found["succeeded"], found["failed"]) == (3, 2, 1)
    assert found["failures"] == {"status 503": 1}
    assert found["errors"] == {"full": 1}
    # a failure in the middle of an answer takes its times and gaps with it
    broken = of(failure=np.array([3, 0, 2]))
    assert broken["longest_pause_ms"] == pytest.approx(200)
    assert broken["ttft_ms"]["mean"] == pytest.approx(600)
    assert broken["output_tokens"] == 11


def test_goodput_counts_failures_and_every_limit() -> None:
    shares = {
        Slo(ttft_ms=200): 1 / 3,
        Slo(ttft_ms=700): 2 / 3,
        Slo(tpot_ms=150): 1 / 3,
        Slo(ttft_ms=700, tpot_ms=150, e2e_ms=400): 0.0,
    }
    for slo, share in shares.items():
        assert of(slo)["goodput"]["share"] == pytest.approx(share), slo
    assert of()["goodput"] is None


def test_without_usage_events_are_counted() -> None:
    found = of(completion_tokens=np.array([-1, -1, -1]))
    assert found["output_tokens"] == 14
    assert found["tokens_from"] == "events"


def test_everything_failed() -> None:
    found = of(failure=np.array([1, 1, 1]), status=np.array([0, 0, 0]))
    assert found["failures"] == {"connect": 3}
    assert found["output_tok_s"] == 0
    assert math.isnan(found["ttft_ms"]["p99"])
    assert found["longest_pause_ms"] is None


def test_an_answer_without_text_has_no_time_to_its_first_token() -> None:
    found = of(text_events=np.array([0, 11, 0]), first=np.array([NAN, 1.6, NAN]), last=np.array([NAN, 3.6, NAN]))
    assert found["without_text"] == 1
    assert found["ttft_ms"]["mean"] == pytest.approx(600)
    assert of(Slo(ttft_ms=1e9), first=np.array([NAN, 1.6, NAN]))["goodput"]["good"] == 1


def test_server_cpu_time_per_token() -> None:
    measured = Measured(result(), cpu_s={"http": 0.016, "engine": 0.032}, rss_bytes={"http": 2**20, "engine": 2**21})
    found = figures(measured, Slo())["server"]
    assert found["cpu_us_per_token"] == pytest.approx({"http": 1000, "engine": 2000, "all": 3000})
    assert found["cpu_s_per_1000_tokens"] == pytest.approx(3.0)
    assert found["rss_mib"]["all"] == 3
    assert of()["server"] is None


def test_the_middle_of_a_run() -> None:
    samples = [Sample(at / 10, at * 10 if at < 30 else 300, 1) for at in range(41)]  # 100 events a second, then none
    found = figures(Measured(result(duration_s=4.0), samples), Slo())
    assert found["steady_output_tok_s"] == pytest.approx(100 * 16 / 14)
    assert of()["steady_output_tok_s"] is None
