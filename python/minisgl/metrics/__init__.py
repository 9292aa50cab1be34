"""What the HTTP process measures, by Prometheus names `minisgl:<name>_<unit>`; docs/metrics.md lists them.

Keeps true: one registry per server, no process-wide state; counting is O(1) per request and step.
Doesn't know: who scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.message import EngineReady, EngineStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class _EngineCollector(Collector):
    """The engine's last snapshot, read when scraped."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], info: Callable[[], EngineReady | None], up: Callable[[], bool]
    ) -> None:
        self._stats = stats
        self._info = info
        self._up = up

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("minisgl:engine_up", "1 while the engine process serves", float(self._up()))
        if (info := self._info()) is not None:
            family = GaugeMetricFamily(
                "minisgl:engine_info", "what serves", labels=("engine", "cpu_backend", "device", "dtype")
            )
            now = self._stats()
            backend = now.cpu_backend if now is not None and now.num_failovers_total else info.cpu_backend
            family.add_metric((info.engine, backend, info.device, info.dtype), 1.0)
            yield family
            fallbacks = CounterMetricFamily(
                "minisgl:control_plane_fallbacks",
                "starts with another control plane than the one that was asked for",
                labels=("reason",),
            )
            fallbacks.add_metric(("extension_missing",), float(bool(info.cpu_backend_fallback)))
            yield fallbacks
        if (stats := self._stats()) is None:
            return
        gauges = (
            ("requests_running", "requests with a row: prefilling or decoding", stats.num_running),
            ("requests_waiting", "accepted requests without a row", stats.num_waiting),
            ("kv_pages", "pages of the KV pool", stats.num_pages),
            ("kv_pages_free", "pages that hold nothing", stats.num_free_pages),
            ("kv_pages_evictable", "cached pages that may go", stats.num_evictable_pages),
            ("kv_pages_protected", "cached pages in use by requests", stats.num_protected_pages),
            ("kv_pages_held", "pages owned by requests", stats.num_held_pages),
            (
                "kv_usage_ratio",
                "share of pages in use by requests",
                (stats.num_protected_pages + stats.num_held_pages) / stats.num_pages,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"minisgl:{name}", text, float(value))
        counters = (
            ("prompt_tokens", "prompt tokens of admitted requests", stats.num_prompt_tokens_total),
            ("cached_tokens", "prompt tokens found in the prefix cache", stats.num_cached_tokens_total),
            ("retractions", "requests put back to waiting for lack of pages", stats.num_retracted_total),
            ("steps", "engine steps", stats.num_steps_total),
            ("control_plane_calls", "calls of the control plane", stats.num_control_plane_calls_total),
            ("control_plane_failovers", "times that it broke and was replaced", stats.num_failovers_total),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"minisgl:{name}", text, value=float(value))


class Metrics:
    """`arrival_time` and `now` are `time.monotonic` seconds."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], info: Callable[[], EngineReady | None], up: Callable[[], bool]
    ) -> None:
        registry = self._registry = CollectorRegistry(auto_describe=False)
        registry.register(_EngineCollector(stats, info, up))
        self._accepted = Counter("minisgl:requests_accepted", "requests given to the engine", registry=registry)
        self._finished = Counter("minisgl:requests_finished", "by finish reason", ("reason",), registry=registry)
        self._generated = Counter("minisgl:generated_tokens", "tokens received from the engine", registry=registry)
        self._ttft = Histogram("minisgl:ttft_seconds", "arrival to first token", registry=registry, buckets=SECONDS)
        self._itl = Histogram("minisgl:itl_seconds", "between tokens of a request", registry=registry, buckets=SECONDS)
        self._e2e = Histogram("minisgl:e2e_seconds", "arrival to last token", registry=registry, buckets=SECONDS)

    def accepted(self, count: int) -> None:
        self._accepted.inc(count)

    def tokens(self, count: int, arrival_time: float, last_time: float | None, now: float) -> None:
        """`count` tokens of one request came at once; the time since the last is shared among them."""
        self._generated.inc(count)
        if last_time is None:
            self._ttft.observe(now - arrival_time)
        else:
            for _ in range(count):
                self._itl.observe((now - last_time) / count)

    def finished(self, reason: str, arrival_time: float) -> None:
        self._finished.labels(reason).inc()
        if reason in ("stop", "length"):
            self._e2e.observe(time.monotonic() - arrival_time)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)
