"""The engine process's last statistics as Prometheus families. Several engines have families of their own with the
label engine, so that the sum over a family's samples is right; a single engine has the label "0". Some values also have
the name and labels of dashboards made for vLLM.

Invariants: values are computed when scraped; every family exists from the start, without samples until there are any;
an alias has the value, type and buckets of its source at the same scrape.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from minisgl.extension import why_missing
from minisgl.message import EngineReady, EngineStats, MeterReading, RankUsage
from minisgl.metrics.engines import EngineView
from minisgl.metrics.meters import histogram
from minisgl.metrics.steps import PHASES

ENGINE, HTTP = "engine", "http"
Counter: TypeAlias = CounterMetricFamily
Gauge: TypeAlias = GaugeMetricFamily
Kind = type[Gauge] | type[Counter]


class EngineCollector(Collector):
    """A collector of the engine's last statistics, read when scraped."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], info: Callable[[], EngineReady | None], up: Callable[[], bool]
    ) -> None:
        self._stats = stats
        self._info = info
        self._up = up

    def collect(self) -> Iterable[Metric]:
        yield family(Gauge, "engine_up", "1 while the engine process serves", [(self._up(),)])
        yield family(Gauge, "extension_loaded", "1 if the compiled extension loads", [(not why_missing(),)])
        stats = self._stats()
        if (info := self._info()) is not None:
            yield from _about(info, stats)
        if stats is not None:
            yield from _requests_and_pages(stats)
            yield from _steps(stats)
            yield from _ranks(stats)


def family(kind: Kind, name: str, text: str, samples: Iterable[Sequence[Any]], *labels: str) -> Metric:
    """Build a Prometheus family. Each of `samples` has the values of `labels`, then the sample's value."""
    metric = kind(f"minisgl:{name}", text, labels=labels)
    for *of_labels, value in samples:
        metric.add_metric(of_labels, float(value))
    return metric


def scheduler_in_use(info: EngineReady, stats: EngineStats | None) -> str:
    """Return the name of the scheduler that serves now. After a failover it differs from the one at start."""
    return stats.cpu_backend if stats is not None and stats.num_failovers_total else info.cpu_backend


def _about(info: EngineReady, stats: EngineStats | None) -> Iterable[Metric]:
    serves = (info.engine, scheduler_in_use(info, stats), info.device, info.dtype, 1.0)
    yield family(Gauge, "engine_info", "the running engine", [serves], "engine", "cpu_backend", "device", "dtype")
    text = "starts with another scheduler than the requested one"
    missing = ("extension_missing", bool(info.cpu_backend_fallback))
    yield family(Counter, "control_plane_fallbacks", text, [missing], "reason")


def _requests_and_pages(stats: EngineStats) -> Iterable[Metric]:
    gauges = (
        ("requests_running", "requests with a row: in prefill or decode", stats.num_running),
        ("requests_waiting", "accepted requests without a row", stats.num_waiting),
        ("kv_pages", "pages of the KV pool", stats.num_pages),
        ("kv_pages_free", "free pages of the KV pool", stats.num_free_pages),
        ("kv_pages_evictable", "cached pages that may be evicted", stats.num_evictable_pages),
        ("kv_pages_protected", "cached pages in use by requests", stats.num_protected_pages),
        ("kv_pages_held", "pages that requests own, not in the prefix cache", stats.num_held_pages),
        ("kv_pages_pinned", "cached pages that are pinned by prefixes", stats.num_pinned_pages),
        ("checkpoints", "slots in use for snapshots of recurrent states", stats.num_checkpoints),
        ("cache_prefixes", "prefixes that clients have stored", len(stats.prefixes)),
        ("store_bytes", "bytes in the page store, --cache-dir", stats.store_bytes),
        ("image_embeddings_bytes", "bytes of image embeddings in the cache", stats.image_bytes),
        (
            "kv_usage_ratio",
            "fraction of pages in use by requests",
            (stats.num_protected_pages + stats.num_held_pages) / max(1, stats.num_pages),
        ),
    )
    counters = (
        ("prompt_tokens", "prompt tokens of admitted requests", stats.num_prompt_tokens_total),
        ("cached_tokens", "prompt tokens that were in the prefix cache", stats.num_cached_tokens_total),
        ("cache_hits", "requests with a part of the prompt in the prefix cache", stats.num_hits_total),
        ("cache_misses", "admitted requests with nothing in the prefix cache", stats.num_misses_total),
        ("cache_inserted_pages", "pages that entered the prefix cache", stats.num_inserted_pages_total),
        ("cache_evicted_pages", "pages evicted from the prefix cache", stats.num_evicted_pages_total),
        ("drafted_tokens", "draft tokens that were computed", stats.num_drafted_total),
        ("accepted_tokens", "draft tokens that were accepted", stats.num_accepted_total),
        ("states_saved", "recurrent states that were saved", stats.num_saved_total),
        ("cache_cut_short", "requests that reused less for lack of a saved state", stats.num_cut_short_total),
        ("computed_again_tokens", "cached tokens that were computed again for a state", stats.num_computed_again_total),
        ("store_written_pages", "pages written to the page store", stats.num_store_written_total),
        ("store_loaded_pages", "pages read from the page store", stats.num_store_loaded_total),
        (
            "store_dropped_pages",
            "pages not written: the disk was too slow",
            stats.num_store_dropped_total,
        ),
        ("store_failed_pages", "pages that could not be written or read", stats.num_store_failed_total),
        ("store_damaged_pages", "damaged pages removed from the page store", stats.num_store_damaged_total),
        ("store_written_states", "recurrent states written to the page store", stats.num_store_written_states_total),
        ("store_loaded_states", "recurrent states read from the page store", stats.num_store_loaded_states_total),
        ("image_embeddings_computed", "images that the vision tower computed", stats.num_tower_runs_total),
        ("image_embeddings_hits", "images whose embeddings were in the cache", stats.num_tower_hits_total),
        ("retractions", "requests sent back to the queue for lack of pages", stats.num_retracted_total),
        ("control_plane_calls", "calls of the scheduler", stats.num_control_plane_calls_total),
        ("control_plane_failovers", "times that the scheduler failed and was replaced", stats.num_failovers_total),
    )
    text = "failovers by scheduler, failed part (scheduler: the whole) and kind of error"
    failovers = [(*labels, number) for labels, number in Tally(stats.failovers).items()]
    yield family(Counter, "failovers", text, failovers, "backend", "part", "reason")
    text = "calls of the scheduler that a shadow compared, by result"
    yield family(Counter, "shadow_calls", text, stats.shadow_calls().items(), "result")
    for kind, rows in ((Gauge, gauges), (Counter, counters)):
        for name, text, value in rows:
            yield family(kind, name, text, [(value,)])


def _steps(stats: EngineStats) -> Iterable[Metric]:
    yield family(Counter, "steps", "engine steps", [(stats.num_steps_total,)])
    yield family(Counter, "step_rows", "rows of all steps, added up", [(stats.num_rows_total,)])
    yield family(Counter, "step_tokens", "tokens that all steps computed", [(stats.num_step_tokens_total,)])
    yield family(Gauge, "batch_rows", "rows of the last step", [(stats.batch_rows,)])
    phases = [(phase, stats.meters[phase]) for phase in PHASES if phase in stats.meters]
    total = [(phase, meter.total_s) for phase, meter in phases]
    longest = [(phase, meter.recent_s) for phase, meter in phases]
    yield family(Counter, "step_phase_seconds", "seconds of the step loop, by phase", total, "phase")
    yield family(Gauge, "step_phase_longest_seconds", "longest of the last 10 to 20 s by phase", longest, "phase")
    yield from histogram("minisgl:schedule_seconds", "seconds to schedule a step", stats.meters.get("schedule"))
    yield from histogram("minisgl:metadata_seconds", "seconds to write a step's arrays", stats.meters.get("metadata"))


def _ranks(stats: EngineStats) -> Iterable[Metric]:
    all_ = (RankUsage(0, stats.cpu_s, stats.resident_bytes), *stats.ranks) if stats.ranks else ()
    cpu_s = [(str(one.rank), one.cpu_s) for one in all_]
    memory = [(str(one.rank), one.resident_bytes) for one in all_]
    yield family(Counter, "rank_cpu_seconds", "CPU seconds by tensor-parallel rank", cpu_s, "rank")
    yield family(Gauge, "rank_resident_bytes", "resident bytes by tensor-parallel rank", memory, "rank")


def process_families(
    cpu_s: Mapping[str, float], resident_bytes: Mapping[str, int], meters: Mapping[str, Mapping[str, MeterReading]]
) -> Iterable[Metric]:
    """Yield CPU time, memory, garbage collections, pauses and messages, by process."""
    yield family(Counter, "process_cpu_seconds", "CPU seconds by process, all threads", cpu_s.items(), "process")
    memory = [(process, resident_bytes[process]) for process in cpu_s]
    yield family(Gauge, "process_resident_bytes", "resident bytes by process", memory, "process")
    of_late = "longest garbage collection in the last 10 to 20 s"
    rows: tuple[tuple[Kind, str, str, str, Callable[[MeterReading], float]], ...] = (
        (
            Gauge,
            "pause_longest_seconds",
            "longest of the last 10 to 20 s without serving anything else",
            "pause",
            _recent,
        ),
        (Counter, "gc_collections", "garbage collections by process", "gc", lambda one: one.count),
        (Counter, "gc_seconds", "seconds of garbage collections by process", "gc", lambda one: one.total_s),
        (Gauge, "gc_longest_seconds", of_late, "gc", _recent),
    )
    for kind, name, text, meter, value in rows:
        yield family(
            kind, name, text, [(process, value(readings[meter])) for process, readings in meters.items()], "process"
        )
    talking = {process: readings for process, readings in meters.items() if readings["decode"].count}
    frames = [(process, readings["decode"].count) for process, readings in talking.items()]
    yield family(Counter, "frames_received", "received frames, each with one or more messages", frames, "process")
    transport = [
        (process, part, readings[part].total_s)
        for process, readings in talking.items()
        for part in ("encode", "decode", "queue")
    ]
    text = "seconds of encoding, decoding and queueing messages"
    yield family(Counter, "transport_seconds", text, transport, "process", "part")


def _recent(reading: MeterReading) -> float:
    return reading.recent_s


def text_families(meters: Mapping[str, MeterReading]) -> Iterable[Metric]:
    """Yield the time and calls that the HTTP process spends on tokenizing and detokenizing."""
    for name, text in (("tokenize", "rendering and encoding prompts"), ("detokenize", "decoding tokens to text")):
        yield family(Counter, f"{name}_seconds", text, [(meters[name].total_s,)])
        yield family(Counter, f"{name}_calls", f"calls of {name}", [(meters[name].count,)])


Value = Callable[[EngineStats], float]
Readings = Mapping[str, Any]
Table = tuple[tuple[str, str, Value], ...]
GAUGES: Table = (
    ("requests_running", "requests with a row", lambda s: s.num_running),
    ("requests_waiting", "accepted requests without a row", lambda s: s.num_waiting),
    ("kv_pages", "pages of the KV pool", lambda s: s.num_pages),
    ("kv_pages_used", "pages in use by requests", lambda s: s.num_protected_pages + s.num_held_pages),
    ("kv_pages_pinned", "cached pages that are pinned by prefixes", lambda s: s.num_pinned_pages),
    ("resident_bytes", "resident bytes of the process", lambda s: s.resident_bytes),
)
COUNTERS: Table = (
    ("prompt_tokens", "prompt tokens of admitted requests", lambda s: s.num_prompt_tokens_total),
    ("cached_tokens", "prompt tokens that were in the prefix cache", lambda s: s.num_cached_tokens_total),
    ("cache_hits", "admitted requests with a part of the prompt cached", lambda s: s.num_hits_total),
    ("cache_misses", "admitted requests with nothing cached", lambda s: s.num_misses_total),
    ("cache_inserted_pages", "pages that entered the prefix cache", lambda s: s.num_inserted_pages_total),
    ("cache_evicted_pages", "pages evicted from the prefix cache", lambda s: s.num_evicted_pages_total),
    ("drafted_tokens", "draft tokens that were computed", lambda s: s.num_drafted_total),
    ("accepted_tokens", "draft tokens that were accepted", lambda s: s.num_accepted_total),
    ("steps", "engine steps", lambda s: s.num_steps_total),
    ("step_tokens", "tokens that all steps computed", lambda s: s.num_step_tokens_total),
    ("step_rows", "rows of all steps, added up", lambda s: s.num_rows_total),
    ("cpu_seconds", "CPU seconds of the process", lambda s: s.cpu_s),
)


def by_engine(views: Sequence[EngineView], pool: Readings | None) -> Iterable[Metric]:
    ready = [(str(view.engine), view.state == "ready") for view in views]
    restarts = [(str(view.engine), view.restarts) for view in views]
    losses = [(str(at), number) for at, number in enumerate(() if pool is None else pool["num_losses_total"])]
    yield family(Gauge, "engine_ready", "1 while the engine serves", ready, "engine")
    yield family(Counter, "engine_restarts", "times that the engine restarted", restarts, "engine")
    yield family(Counter, "engine_losses", "times that the engine died or hung", losses, "engine")
    serving = [(str(view.engine), stats) for view in views if (stats := view.stats) is not None]
    for kind, rows in ((Gauge, GAUGES), (Counter, COUNTERS)):
        for name, text, value in rows:
            samples = [(engine, value(stats)) for engine, stats in serving]
            yield family(kind, f"engine_{name}", f"{text}, by engine", samples, "engine")
    for kind, name, text, key in (
        (Counter, "pool_requests_moved", "requests of a lost engine that continued in another one", "num_moved_total"),
        (Gauge, "pool_requests_waiting", "requests that wait for an engine", "num_waiting"),
    ):
        yield family(kind, name, text, [] if pool is None else [(pool[key],)])


BATCH_LINES: tuple[tuple[str, str, Kind], ...] = (
    ("waiting", "batch lines that wait", Gauge),
    ("running", "batch lines that are being answered", Gauge),
    ("answered", "batch lines with a successful response", Counter),
    ("failed", "batch lines with an error", Counter),
)


def of_batches(lines: Readings | None) -> Iterable[Metric]:
    """Yield the families of batch lines. `lines` has the counts that wait and run now, and that were answered and
    failed since the start; None: no samples."""
    for name, text, kind in BATCH_LINES:
        yield family(kind, f"batch_lines_{name}", text, [] if lines is None else [(lines[name],)])


VLLM: dict[str, tuple[str, ...]] = {
    "minisgl:requests_running": ("vllm:num_requests_running",),
    "minisgl:requests_waiting": ("vllm:num_requests_waiting",),
    "minisgl:kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "minisgl:retractions": ("vllm:num_preemptions",),
    "minisgl:prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "minisgl:cached_tokens": ("vllm:prefix_cache_hits",),
    "minisgl:drafted_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "minisgl:accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "minisgl:generated_tokens": ("vllm:generation_tokens",),
    "minisgl:requests_finished": ("vllm:request_success",),
    "minisgl:ttft_seconds": ("vllm:time_to_first_token_seconds",),
    "minisgl:itl_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "minisgl:e2e_seconds": ("vllm:e2e_request_latency_seconds",),
    "minisgl:queue_seconds": ("vllm:request_queue_time_seconds",),
    "minisgl:prompt_length_tokens": ("vllm:request_prompt_tokens",),
    "minisgl:answer_length_tokens": ("vllm:request_generation_tokens",),
}
"""vLLM's names by family; counters get `_total` from the client library. Second names are vLLM's older ones."""
_LABELS = {"reason": "finished_reason"}
_NOT_A_SUCCESS = ("error",)


class AliasCollector(Collector):
    def __init__(self, sources: Sequence[Collector], model_name: str) -> None:
        self._sources = sources
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for source in self._sources:
            for family in source.collect():
                for name in VLLM.get(family.name, ()):
                    yield self._renamed(family, name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            if sample.labels.get("reason") in _NOT_A_SUCCESS:
                continue
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()} | self._labels
            alias.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, sample.value))
        return alias
