"""What the server shows of its meters: under all names, as JSON and as Prometheus reads it."""

from __future__ import annotations

import json

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.message import (
    EngineStats,
)
from minisgl.metrics.server_metrics import Metrics
from tests.helpers.sim import Sim, request


def _stats() -> EngineStats:
    sim = Sim()
    sim.run([request(0, 3, 4)])
    readings = sim.loop.timers.meters.readings()
    own = {"cpu_s": 1.5, "resident_bytes": 7, "num_drafted_total": 9, "num_accepted_total": 4}
    return EngineStats(2, 3, 64, 40, 8, 10, 6, 5, 700, 300, 900, meters=readings, **own)  # type: ignore[arg-type]


def test_aliases_have_the_same_values() -> None:
    stats = _stats()
    metrics = Metrics(lambda: stats, lambda: None, lambda: True, aliases_for="some/model")
    metrics.accepted(3)
    metrics.tokens(4, 0.0, None, 0.3)
    metrics.tokens(2, 0.0, 0.3, 0.5)
    for reason in ("stop", "error", "length"):
        metrics.finished(reason, 0.0, 40, 6)
    metrics.queue.observe(0.1)
    families = {one.name: one for one in text_string_to_metric_families(metrics.render().decode())}
    aliases = {name: one for name, one in families.items() if name.startswith("vllm:")}
    assert len(aliases) == 19
    labels = {"model_name": "some/model", "engine": "0"}
    assert all(sample.labels.items() >= labels.items() for one in aliases.values() for sample in one.samples)
    values = {name: one.samples[0].value for name, one in aliases.items() if len(one.samples) == 1}
    assert values == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:num_preemptions": 5,
        "vllm:prompt_tokens": 700,
        "vllm:prefix_cache_queries": 700,
        "vllm:prefix_cache_hits": 300,
        "vllm:generation_tokens": 6,
        "vllm:spec_decode_num_draft_tokens": 9,
        "vllm:spec_decode_num_accepted_tokens": 4,
    }
    reasons = {one.labels["finished_reason"]: one.value for one in aliases["vllm:request_success"].samples}
    assert reasons == {"stop": 1, "length": 1, "abort": 0}
    for ours, alias in (
        ("ttft_seconds", "time_to_first_token_seconds"),
        ("itl_seconds", "inter_token_latency_seconds"),
        ("queue_seconds", "request_queue_time_seconds"),
        ("answer_length_tokens", "request_generation_tokens"),
    ):
        pairs = zip(families[f"minisgl:{ours}"].samples, aliases[f"vllm:{alias}"].samples, strict=True)
        assert all(a.value == b.value and a.labels.get("le") == b.labels.get("le") for a, b in pairs)
    assert "vllm:" not in Metrics(lambda: stats, lambda: None, lambda: True).render().decode()


def test_images_have_families() -> None:
    stats = msgspec.structs.replace(_stats(), num_tower_runs_total=3, num_tower_hits_total=2, image_bytes=7)
    shown = Metrics(lambda: stats, lambda: None, lambda: True).render().decode()
    for line in ("computed_total 3.0", "hits_total 2.0", "bytes 7.0"):
        assert f"\nminisgl:image_embeddings_{line}\n" in shown


def test_the_snapshot_is_plain_json() -> None:
    stats = _stats()
    metrics = Metrics(lambda: stats, lambda: None, lambda: True)
    metrics.dispatch.add(2_000_000_000)
    found = json.loads(json.dumps(metrics.snapshot()))
    assert found["http"]["meters"]["dispatch"] == {"count": 1, "total_s": 2.0, "longest_s": 2.0, "recent_s": 2.0}
    assert found["engine"]["cpu_s"] == 1.5 and found["engine"]["meters"]["schedule"]["count"] > 0
    assert Metrics(lambda: None, lambda: None, lambda: True).snapshot()["engine"] is None


def test_everything_collected_is_valid_text() -> None:
    registry = CollectorRegistry()
    registry.register(Metrics(_stats, lambda: None, lambda: True))
    names = [one.name for one in text_string_to_metric_families(generate_latest(registry).decode())]
    assert len(names) == len(set(names)) > 10
