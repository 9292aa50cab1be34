"""What the HTTP process measures, by Prometheus names `minisgl:<name>_<unit>`; docs/metrics.md lists them.

Keeps true: one registry per server, no process-wide state but the watch on garbage collections between `start` and
`stop`; counting is O(1) per request and step, and belongs to the thread of the event loop.
Doesn't know: who scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.message import Codec, EngineReady, EngineStats, MeasuredCodec, MeterReading
from minisgl.metrics.aliases import AliasCollector
from minisgl.metrics.chrome_trace import ChromeTrace, TracedMeter
from minisgl.metrics.families import ENGINE, HTTP, EngineCollector, process_families, text_families
from minisgl.metrics.histogram import Histogram
from minisgl.metrics.lag import LoopLag
from minisgl.metrics.meters import GcWatch, Meter, Meters, Peak, cpu_seconds, resident_bytes
from minisgl.metrics.spread import percentiles

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
REASONS = ("stop", "length", "abort", "error")
TRACED = ("dispatch", "tokenize", "gc", "encode", "decode")
METERS = ("dispatch", "tokenize", "detokenize", "pause", "gc", "encode", "decode", "queue")


class Metrics(Collector):
    """`waiting`: requests that were given to the engine and have no row yet. `arrival_time` and `now` are
    `time.monotonic` seconds. `aliases_for`: a model name under which the values also have the names that vLLM's
    dashboards ask for. `trace` gets what the event loop does.

    Whoever does the work meters it: `dispatch` (handing one step's message to its streams), `tokenize` (rendering and
    encoding a prompt), `detokenize` (text of a step's tokens): `Meter.add(nanoseconds)`, on the event loop."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        info: Callable[[], EngineReady | None],
        up: Callable[[], bool],
        *,
        waiting: Callable[[], int] = lambda: 0,
        aliases_for: str | None = None,
        trace: ChromeTrace | None = None,
    ) -> None:
        self._stats = stats
        self._registry = CollectorRegistry(auto_describe=False)
        engine = EngineCollector(stats, info, up)
        self._registry.register(engine)
        self._registry.register(self)
        if aliases_for is not None:
            self._registry.register(AliasCollector((engine, self), aliases_for))
        self._num_accepted = 0
        self._num_generated = 0
        self._num_finished = dict.fromkeys(REASONS, 0)
        self._in_flight = Peak(lambda: self._num_accepted - sum(self._num_finished.values()))
        self._queued = Peak(waiting)
        self._ttft = Histogram("minisgl:ttft_seconds", "arrival to first token", SECONDS)
        self._itl = Histogram("minisgl:itl_seconds", "between tokens of a request", SECONDS)
        self._e2e = Histogram("minisgl:e2e_seconds", "arrival to last token", SECONDS)
        self.queue = Histogram("minisgl:queue_seconds", "given to the engine to having a row", SECONDS)
        self._prompt = Histogram("minisgl:prompt_length_tokens", "tokens of a prompt", TOKENS)
        self._answer = Histogram("minisgl:answer_length_tokens", "generated tokens of a finished request", TOKENS)
        self._trace = trace
        self._meters = Meters(METERS, self._meter)
        self.dispatch, self.tokenize, self.detokenize = map(self._meters.__getitem__, METERS[:3])
        self._gc = GcWatch(self._meters["gc"])
        self._lag = LoopLag(self._meters["pause"], lambda: self._num_accepted > sum(self._num_finished.values()))

    def _meter(self, name: str) -> Meter:
        if self._trace is None or name not in TRACED:
            return Meter(name)
        return TracedMeter(name, self._trace, ends_step=name == "dispatch")

    def start(self) -> None:
        """Watch the running event loop and this process's garbage collector, until `stop`. What was metered while the
        server was starting is forgotten."""
        self._meters.reset()
        self._gc.start()
        self._lag.start()

    def stop(self) -> None:
        """Idempotent."""
        self._gc.stop()
        self._lag.stop()
        if self._trace is not None:
            self._trace.write()

    def codec(self, *, measured: bool) -> Codec:
        """For the messages of this process."""
        return MeasuredCodec(*(self._meters[name] for name in ("encode", "decode", "queue"))) if measured else Codec()

    # ------------------------------------------------------------------------------------------------------ counting

    def accepted(self, count: int) -> None:
        self._num_accepted += count
        self._in_flight.see()
        self._queued.see()

    def tokens(self, count: int, arrival_time: float, last_time: float | None, now: float) -> None:
        """`count` tokens of one request came at once; the time since the last is shared among them."""
        self._num_generated += count
        if last_time is None:
            self._ttft.observe(now - arrival_time)
        else:
            self._itl.observe((now - last_time) / count, count)

    def finished(self, reason: str, arrival_time: float, num_prompt: int, num_generated: int) -> None:
        """Tokens of its prompt and of its answer."""
        self._num_finished[reason] += 1
        self._prompt.observe(num_prompt)
        if reason in ("stop", "length"):
            self._answer.observe(num_generated)
            self._e2e.observe(time.monotonic() - arrival_time)

    # ------------------------------------------------------------------------------------------------------- telling

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "minisgl:requests_accepted", "requests given to the engine", value=float(self._num_accepted)
        )
        finished = CounterMetricFamily("minisgl:requests_finished", "by finish reason", labels=("reason",))
        for reason, count in self._num_finished.items():
            finished.add_metric((reason,), float(count))
        yield finished
        for name, text, peak in (
            ("in_flight", "accepted and not finished", self._in_flight),
            ("queued", "given to the engine and without a row", self._queued),
        ):
            recent = float(peak.read()["recent"])
            yield GaugeMetricFamily(f"minisgl:requests_{name}_most", f"{text}, most of the last 10 to 20 s", recent)
        generated = float(self._num_generated)
        yield CounterMetricFamily("minisgl:generated_tokens", "tokens received from the engine", value=generated)
        for one in (self._ttft, self._itl, self._e2e, self.queue, self._prompt, self._answer):
            yield one.collect()
        stats = self._stats()
        meters = {HTTP: self._meters.readings()}
        cpu_s, memory = {HTTP: cpu_seconds()}, {HTTP: resident_bytes()}
        yield from text_families(meters[HTTP])
        if stats is not None and stats.meters:
            meters[ENGINE], cpu_s[ENGINE], memory[ENGINE] = stats.meters, stats.cpu_s, stats.resident_bytes
        yield from process_families(cpu_s, memory, meters)

    def snapshot(self) -> dict[str, Any]:
        """The same as plain data, with what only a reader of figures wants: counts, and the longest since the start."""
        http: dict[str, Any] = {
            "requests_accepted": self._num_accepted,
            "requests_finished": dict(self._num_finished),
            "requests_in_flight": self._in_flight.read(),
            "requests_queued": self._queued.read(),
            "generated_tokens": self._num_generated,
            "cpu_s": cpu_seconds(),
            "resident_bytes": resident_bytes(),
            "meters": {name: _meter(reading) for name, reading in self._meters.readings().items()},
        }
        engine: dict[str, Any] | None = None
        if (stats := self._stats()) is not None:
            engine = {name: getattr(stats, name) for name in stats.__struct_fields__}
            engine["ranks"] = [_plain(one) for one in stats.ranks]
            engine["meters"] = {name: _meter(reading) for name, reading in stats.meters.items()}
        return {"http": http, "engine": engine}


def _meter(reading: MeterReading) -> dict[str, float]:
    """Percentiles in place of the buckets that they are from."""
    found = _plain(reading)
    del found["spread"]
    return {**found, **percentiles(reading.spread, reading.longest_s)}


def _plain(reading: msgspec.Struct) -> dict[str, float]:
    return {name: getattr(reading, name) for name in reading.__struct_fields__}
