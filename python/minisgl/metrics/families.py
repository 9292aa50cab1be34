"""What the engine process last said of itself, as Prometheus families.

Invariants: computed when somebody asks; every family is there from the start, without samples until there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.message import EngineReady, EngineStats, MeterReading
from minisgl.metrics.spread import histogram
from minisgl.metrics.steps import PHASES

ENGINE, HTTP = "engine", "http"


class EngineCollector(Collector):
    """The engine's last snapshot, read when scraped."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], info: Callable[[], EngineReady | None], up: Callable[[], bool]
    ) -> None:
        self._stats = stats
        self._info = info
        self._up = up

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("minisgl:engine_up", "1 while the engine process serves", float(self._up()))
        stats = self._stats()
        if (info := self._info()) is not None:
            yield from _about(info, stats)
        if stats is not None:
            yield from _requests_and_pages(stats)
            yield from _steps(stats)
            yield from _ranks(stats)


def _about(info: EngineReady, stats: EngineStats | None) -> Iterable[Metric]:
    family = GaugeMetricFamily(
        "minisgl:engine_info", "what serves", labels=("engine", "cpu_backend", "device", "dtype")
    )
    backend = stats.cpu_backend if stats is not None and stats.num_failovers_total else info.cpu_backend
    family.add_metric((info.engine, backend, info.device, info.dtype), 1.0)
    yield family
    fallbacks = CounterMetricFamily(
        "minisgl:control_plane_fallbacks",
        "starts with another scheduler than the one that was asked for",
        labels=("reason",),
    )
    fallbacks.add_metric(("extension_missing",), float(bool(info.cpu_backend_fallback)))
    yield fallbacks


def _requests_and_pages(stats: EngineStats) -> Iterable[Metric]:
    gauges = (
        ("requests_running", "requests with a row: prefilling or decoding", stats.num_running),
        ("requests_waiting", "accepted requests without a row", stats.num_waiting),
        ("kv_pages", "pages of the KV pool", stats.num_pages),
        ("kv_pages_free", "pages that hold nothing", stats.num_free_pages),
        ("kv_pages_evictable", "cached pages that may go", stats.num_evictable_pages),
        ("kv_pages_protected", "cached pages in use by requests", stats.num_protected_pages),
        ("kv_pages_held", "pages owned by requests", stats.num_held_pages),
        ("kv_pages_pinned", "cached pages that prefixes have pinned", stats.num_pinned_pages),
        ("cache_prefixes", "prefixes that are kept on order", len(stats.prefixes)),
        (
            "kv_usage_ratio",
            "share of pages in use by requests",
            (stats.num_protected_pages + stats.num_held_pages) / max(1, stats.num_pages),
        ),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"minisgl:{name}", text, float(value))
    counters = (
        ("prompt_tokens", "prompt tokens of admitted requests", stats.num_prompt_tokens_total),
        ("cached_tokens", "prompt tokens found in the prefix cache", stats.num_cached_tokens_total),
        ("cache_hits", "requests that found some of their prompt in the prefix cache", stats.num_hits_total),
        ("cache_misses", "requests that found nothing of it", stats.num_misses_total),
        ("cache_inserted_pages", "pages that came into the prefix cache", stats.num_inserted_pages_total),
        ("cache_evicted_pages", "pages that left it", stats.num_evicted_pages_total),
        ("drafted_tokens", "tokens that were guessed and computed", stats.num_drafted_total),
        ("accepted_tokens", "of these, those that were right", stats.num_accepted_total),
        ("retractions", "requests put back to waiting for lack of pages", stats.num_retracted_total),
        ("control_plane_calls", "calls of the scheduler", stats.num_control_plane_calls_total),
        ("control_plane_failovers", "times that it broke and was replaced", stats.num_failovers_total),
    )
    for name, text, value in counters:
        yield CounterMetricFamily(f"minisgl:{name}", text, value=float(value))


def _steps(stats: EngineStats) -> Iterable[Metric]:
    yield CounterMetricFamily("minisgl:steps", "engine steps", value=float(stats.num_steps_total))
    yield CounterMetricFamily("minisgl:step_rows", "rows of all steps", value=float(stats.num_rows_total))
    tokens = float(stats.num_step_tokens_total)
    yield CounterMetricFamily("minisgl:step_tokens", "tokens that all steps computed", value=tokens)
    yield GaugeMetricFamily("minisgl:batch_rows", "rows of the last step", float(stats.batch_rows))
    total = CounterMetricFamily("minisgl:step_phase_seconds", "time of the step loop by phase", labels=("phase",))
    longest = GaugeMetricFamily(
        "minisgl:step_phase_longest_seconds", "longest of the last 10 to 20 s by phase", labels=("phase",)
    )
    for phase in PHASES:
        if (reading := stats.meters.get(phase)) is not None:
            total.add_metric((phase,), reading.total_s)
            longest.add_metric((phase,), reading.recent_s)
    yield total
    yield longest
    yield from histogram("minisgl:schedule_seconds", "deciding and writing a step", stats.meters.get("schedule"))
    yield from histogram("minisgl:metadata_seconds", "of that, writing its arrays", stats.meters.get("metadata"))


def _ranks(stats: EngineStats) -> Iterable[Metric]:
    cpu = CounterMetricFamily("minisgl:rank_cpu_seconds", "CPU time by tensor-parallel rank", labels=("rank",))
    memory = GaugeMetricFamily("minisgl:rank_resident_bytes", "memory by tensor-parallel rank", labels=("rank",))
    if stats.ranks:
        cpu.add_metric(("0",), stats.cpu_s)
        memory.add_metric(("0",), float(stats.resident_bytes))
    for one in stats.ranks:
        cpu.add_metric((str(one.rank),), one.cpu_s)
        memory.add_metric((str(one.rank),), float(one.resident_bytes))
    yield cpu
    yield memory


def process_families(
    cpu_s: Mapping[str, float], resident_bytes: Mapping[str, int], meters: Mapping[str, Mapping[str, MeterReading]]
) -> Iterable[Metric]:
    """CPU, memory, collections, pauses and messages, by process."""
    labels = ("process",)
    cpu = CounterMetricFamily("minisgl:process_cpu_seconds", "CPU time by process, all threads", labels=labels)
    memory = GaugeMetricFamily("minisgl:process_resident_bytes", "memory by process", labels=labels)
    for process, seconds in cpu_s.items():
        cpu.add_metric((process,), seconds)
        memory.add_metric((process,), float(resident_bytes[process]))
    yield cpu
    yield memory
    pause = GaugeMetricFamily(
        "minisgl:pause_longest_seconds",
        "longest of the last 10 to 20 s without serving anything else",
        labels=labels,
    )
    collections = CounterMetricFamily("minisgl:gc_collections", "garbage collections", labels=labels)
    collecting = CounterMetricFamily("minisgl:gc_seconds", "time of garbage collections", labels=labels)
    longest = GaugeMetricFamily("minisgl:gc_longest_seconds", "longest of the last 10 to 20 s", labels=labels)
    frames = CounterMetricFamily("minisgl:frames_received", "messages, several to a frame", labels=labels)
    transport = CounterMetricFamily(
        "minisgl:transport_seconds", "encoding, decoding and queueing of messages", labels=("process", "part")
    )
    for process, found in meters.items():
        pause.add_metric((process,), found["pause"].recent_s)
        collections.add_metric((process,), float(found["gc"].count))
        collecting.add_metric((process,), found["gc"].total_s)
        longest.add_metric((process,), found["gc"].recent_s)
        if found["decode"].count:
            frames.add_metric((process,), float(found["decode"].count))
            for part in ("encode", "decode", "queue"):
                transport.add_metric((process, part), found[part].total_s)
    yield from (pause, collections, collecting, longest, frames, transport)


def text_families(meters: Mapping[str, MeterReading]) -> Iterable[Metric]:
    """What the HTTP process spends on text."""
    for name, text in (("tokenize", "rendering and encoding prompts"), ("detokenize", "turning tokens into text")):
        yield CounterMetricFamily(f"minisgl:{name}_seconds", text, value=meters[name].total_s)
        yield CounterMetricFamily(f"minisgl:{name}_calls", f"calls of {name}", value=float(meters[name].count))
