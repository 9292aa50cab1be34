"""One figure, whoever answered."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from minisgl.metrics.gateway import OTHER, Readings
from minisgl.metrics.server_metrics import Metrics
from tests.helpers.bodies import CHAT, GENERATE
from tests.helpers.gateway import no_readings


def samples(metrics: Metrics) -> dict[str, float]:
    """By name, and the labels that matter."""
    return {
        " ".join(
            [one.name, *(one.labels[name] for name in ("route", "reason", "outcome", "le") if name in one.labels)]
        ): one.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for one in family.samples
    }


def some_readings() -> Readings:
    found = no_readings()
    found |= {"num_accepted": 3, "num_generated": 20, "num_waiting": 1}
    found["requests"] = [(CHAT, "", 2), (CHAT, "tools", 4), (GENERATE, "field", 1), (OTHER, "route", 9)]
    found["num_finished"]["stop"] = 2
    found["cache"] = {"hits": 7, "misses": 8, "hit_bytes": 900, "bytes": 1000}
    found["histograms"]["ttft"]["counts"][0] = 2  # up to 1 ms
    found["histograms"]["ttft"]["counts"][-1] = 1  # beyond 300 s
    found["histograms"]["ttft"]["sum"] = 400.002
    found["meters"]["tokenize"] = {"count": 4, "total_s": 0.5, "longest_s": 0.3, "recent_s": 0.2}
    return found


def test_figures_include_the_gateways_counts() -> None:
    metrics = Metrics(lambda: None, lambda: None, lambda: True, gateway=some_readings)
    metrics.accepted(2)
    metrics.tokens(1, 10.0, None, 10.02)
    metrics.finished("stop", 10.0, 5, 1)
    metrics.tokenize.add(250_000_000)
    found = samples(metrics)
    assert found["minisgl:requests_accepted_total"] == 5
    assert found["minisgl:requests_finished_total stop"] == 3
    assert found["minisgl:generated_tokens_total"] == 21
    assert [found[f"minisgl:ttft_seconds_bucket {le}"] for le in ("0.001", "0.01", "0.025", "300.0", "+Inf")] == [
        2, 2, 3, 3, 4,
    ]  # fmt: skip
    assert found["minisgl:ttft_seconds_count"] == 4
    assert abs(found["minisgl:ttft_seconds_sum"] - 400.022) < 1e-6
    assert found["minisgl:tokenize_calls_total"] == 5
    assert found["minisgl:tokenize_seconds_total"] == 0.75
    assert found["minisgl:requests_in_flight_most"] == 2
    assert found["minisgl:requests_queued_most"] == 1
    requests = "minisgl:gateway_requests_total"
    assert found[f"{requests} {CHAT}  answered"] == 2 and found[f"{requests} {CHAT} tools passed_on"] == 4
    assert found[f"{requests} {OTHER} route passed_on"] == 9
    assert found["minisgl:encode_cache_texts_total hit"] == 7
    assert found["minisgl:encode_cache_texts_total miss"] == 8
    assert found["minisgl:encode_cache_hit_bytes_total"] == 900
    assert found["minisgl:encode_cache_bytes"] == 1000
    plain = metrics.snapshot()["http"]
    assert plain["requests_accepted"] == 5 and plain["requests_finished"]["stop"] == 3
    assert plain["meters"]["tokenize"]["longest_s"] == 0.3
    assert plain["gateway"]["answered"] == 2 and plain["gateway"]["passed_on"] == 5
    assert plain["gateway"]["routes"][CHAT] == {"answered": 2, "tools": 4}


def test_gateway_metrics_have_no_value_without_a_gateway() -> None:
    metrics = Metrics(lambda: None, lambda: None, lambda: True)
    assert not [name for name in samples(metrics) if "gateway" in name or "encode_cache" in name]
    assert b"minisgl:gateway_requests_total" in metrics.render()
    assert "gateway" not in metrics.snapshot()["http"]
