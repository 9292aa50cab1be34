"""The HTTP process's metrics, with Prometheus names `minisgl:<name>_<unit>`; docs/metrics.md lists them. Every figure
includes the gateway's counts.

Invariants: one registry per server, and no process-wide state except the watch on garbage collections between `start`
and `stop`; counting is O(1) per request and step, on the event loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from minisgl.message import EngineReady, EngineStats, MeterReading
from minisgl.message.codec import Codec, MeasuredCodec
from minisgl.metrics.engines import EngineView
from minisgl.metrics.families import (
    ENGINE,
    HTTP,
    AliasCollector,
    Counter,
    EngineCollector,
    Gauge,
    by_engine,
    family,
    of_batches,
    process_families,
    scheduler_in_use,
    text_families,
)
from minisgl.metrics.families import Readings as OtherReadings
from minisgl.metrics.gateway import Readings, both, families, higher, shown
from minisgl.metrics.histogram import Histogram
from minisgl.metrics.keys import KeyCounts
from minisgl.metrics.keys import families as key_families
from minisgl.metrics.meters import GcWatch, LoopLag, Meter, Meters, Peak, cpu_seconds, percentiles, resident_bytes
from minisgl.metrics.steps import ChromeTrace, TracedMeter

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
REASONS = ("stop", "length", "abort", "error")
TRACED = ("dispatch", "tokenize", "gc", "encode", "decode")
Count = Literal["num_accepted", "num_generated"]
"""Names of counters that the gateway has too (`Readings`)."""
METERS = ("dispatch", "tokenize", "detokenize", "pause", "gc", "encode", "decode", "queue")


class Metrics(Collector):
    """The metrics of a server. `gateway` returns the gateway's counters, and `beat` tells it that the event loop runs.
    `engines` returns the views of all engines, and `pool` the counters of the pool. `waiting` returns how many
    requests of this process have no row yet. With the model name `aliases_for`, the values also have the names of
    vLLM's dashboards. `trace` records what the event loop does.
    `arrival_time` and `now` are `time.monotonic` seconds. The code that does the work meters it on the event loop with
    `Meter.add(nanoseconds)`: `dispatch` (passing one step's message to its streams), `tokenize` (rendering and encoding
    a prompt), `detokenize` (text of a step's tokens)."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        info: Callable[[], EngineReady | None],
        up: Callable[[], bool],
        *,
        waiting: Callable[[], int] = lambda: 0,
        gateway: Callable[[], Readings] | None = None,
        beat: Callable[[], None] = lambda: None,
        aliases_for: str | None = None,
        frontend: str = "python",
        routing: str = "none",
        trace: ChromeTrace | None = None,
        engines: Callable[[], Sequence[EngineView]] = tuple,
        pool: Callable[[], OtherReadings] | None = None,
        keys: Sequence[KeyCounts] = (),
    ) -> None:
        self._stats, self._info = stats, info
        self._front_end_and_routing = (frontend, routing)
        self._engines = engines
        self._pool: Callable[[], OtherReadings | None] = pool or (lambda: None)
        self._keys = keys
        self.batches: Callable[[], OtherReadings | None] = lambda: None  # set if the server has batches
        self._registry = CollectorRegistry(auto_describe=False)
        engine = EngineCollector(stats, info, up)
        self._registry.register(engine)
        self._registry.register(self)
        if aliases_for is not None:
            self._registry.register(AliasCollector((engine, self), aliases_for))
        self._counts: dict[Count, int] = dict.fromkeys(get_args(Count), 0)
        self._num_shortened = 0
        self._num_finished = dict.fromkeys(REASONS, 0)
        self._gateway: Callable[[], Readings | None] = gateway or (lambda: None)
        self._waiting = waiting
        self._there: Readings | None = None  # the gateway's last reading
        self._in_flight = Peak(self._now_in_flight)
        self._queued = Peak(self._now_queued)
        self._ttft = Histogram("minisgl:ttft_seconds", "seconds from arrival to the first token", SECONDS)
        self._itl = Histogram("minisgl:itl_seconds", "seconds between tokens of a request", SECONDS)
        self._e2e = Histogram("minisgl:e2e_seconds", "seconds from arrival to the last token", SECONDS)
        self.queue = Histogram("minisgl:queue_seconds", "seconds in the engine before a row", SECONDS)
        self._prompt = Histogram("minisgl:prompt_length_tokens", "tokens of a prompt", TOKENS)
        self._answer = Histogram("minisgl:answer_length_tokens", "generated tokens of a finished request", TOKENS)
        self._histograms = {  # by the names of `Readings`
            "ttft": self._ttft,
            "itl": self._itl,
            "e2e": self._e2e,
            "queue": self.queue,
            "prompt": self._prompt,
            "answer": self._answer,
        }
        self._trace = trace
        self._meters = Meters(METERS, self._meter)
        self.dispatch, self.tokenize, self.detokenize = map(self._meters.__getitem__, METERS[:3])
        self._gc = GcWatch(self._meters["gc"])
        self._lag = LoopLag(
            self._meters["pause"], lambda: self._counts["num_accepted"] > sum(self._num_finished.values()), beat
        )

    def _meter(self, name: str) -> Meter:
        if self._trace is None or name not in TRACED:
            return Meter(name)
        return TracedMeter(name, self._trace, ends_step=name == "dispatch")

    def start(self) -> None:
        """Watch the running event loop and this process's garbage collector until `stop`. Meters start from zero."""
        self._meters.reset()
        self._gc.start()
        self._lag.start()

    def stop(self) -> None:
        """Stop watching event loop and garbage collector, and write the trace. Idempotent."""
        self._gc.stop()
        self._lag.stop()
        if self._trace is not None:
            self._trace.write()

    def codec(self, *, measured: bool) -> Codec:
        """Return the codec for this process's messages."""
        if not measured:
            return Codec()
        return MeasuredCodec(*(self._meters[name].add for name in ("encode", "decode", "queue")))

    # ------------------------------------------------------------------------------------------------------ counting

    def accepted(self, count: int) -> None:
        self._counts["num_accepted"] += count
        self._in_flight.see()
        self._queued.see()

    def shortened(self, count: int) -> None:
        """Count requests that were accepted with less than their default length."""
        self._num_shortened += count

    def tokens(self, count: int, arrival_time: float | None, last_time: float | None, now: float) -> None:
        """Count `count` tokens of one request that arrived together; the time since `last_time` is divided among them.
        Without an `arrival_time` no client waits for them, and no latencies are recorded."""
        self._counts["num_generated"] += count
        if arrival_time is None:
            return
        if last_time is None:
            self._ttft.observe(now - arrival_time)
        else:
            self._itl.observe((now - last_time) / count, count)

    def finished(self, reason: str, arrival_time: float | None, num_prompt: int, num_generated: int) -> None:
        """Count a finished request with its prompt and generated tokens."""
        self._num_finished[reason] += 1
        self._prompt.observe(num_prompt)
        if reason in ("stop", "length"):
            self._answer.observe(num_generated)
            if arrival_time is not None:
                self._e2e.observe(time.monotonic() - arrival_time)

    # -------------------------------------------------------------------------------------------- with the gateway's

    def latencies(self) -> dict[str, list[int]]:
        """Return counts of TTFT and ITL by bucket of `SECONDS`; the gateway's are as of the last `snapshot`."""
        there = self._there
        return {
            name: self._histograms[name].counts(() if there is None else there["histograms"][name]["counts"])
            for name in ("ttft", "itl")
        }

    def _all(self, name: Count) -> int:
        return self._counts[name] + (self._there[name] if self._there is not None else 0)

    def _all_finished(self) -> dict[str, int]:
        there = self._there["num_finished"] if self._there is not None else {}
        return {reason: count + there.get(reason, 0) for reason, count in self._num_finished.items()}

    def _all_keys(self) -> list[KeyCounts]:
        there = self._there["keys"] if self._there is not None else []
        return [one.with_(there[i] if i < len(there) else None) for i, one in enumerate(self._keys)]

    def _now_in_flight(self) -> int:
        """Return the number of requests in flight. The gateway's are as of the last reading."""
        return self._all("num_accepted") - sum(self._all_finished().values())

    def _now_queued(self) -> int:
        return self._waiting() + (self._there["num_waiting"] if self._there is not None else 0)

    def _peak(self, name: str, peak: Peak) -> dict[str, int]:
        return higher(peak.read(), None if self._there is None else self._there["most"][name])

    def _meter_readings(self) -> dict[str, MeterReading]:
        here = self._meters.readings()
        return here if self._there is None else both(here, self._there["meters"])

    # ------------------------------------------------------------------------------------------------------- telling

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        self._there = self._gateway()
        if (info := self._info()) is not None:
            serves = (scheduler_in_use(info, self._stats()), *self._front_end_and_routing, 1.0)
            yield family(Gauge, "server_info", "the running server", [serves], "scheduler", "frontend", "routing")
        yield family(Counter, "requests_accepted", "requests sent to the engine", [(self._all("num_accepted"),)])
        yield family(Counter, "requests_finished", "requests by finish reason", self._all_finished().items(), "reason")
        for name, text, peak in (
            ("in_flight", "accepted, unfinished requests", self._in_flight),
            ("queued", "requests sent to the engine, without a row", self._queued),
        ):
            recent = self._peak(name, peak)["recent"]
            yield family(Gauge, f"requests_{name}_most", f"{text}, most of the last 10 to 20 s", [(recent,)])
        yield family(Counter, "generated_tokens", "tokens received from the engine", [(self._all("num_generated"),)])
        short = self._num_shortened
        yield family(Counter, "requests_shortened", "requests with less than their default length", [(short,)])
        yield from key_families(self._all_keys())
        yield from of_batches(self.batches())
        there = self._there
        for name, one in self._histograms.items():
            yield one.collect(**there["histograms"][name]) if there is not None else one.collect()
        yield from families(there)
        yield from by_engine(self._engines(), self._pool())
        stats = self._stats()
        meters = {HTTP: self._meter_readings()}
        cpu_s, memory = {HTTP: cpu_seconds()}, {HTTP: resident_bytes()}
        yield from text_families(meters[HTTP])
        if stats is not None and stats.meters:
            meters[ENGINE], cpu_s[ENGINE], memory[ENGINE] = stats.meters, stats.cpu_s, stats.resident_bytes
        yield from process_families(cpu_s, memory, meters)

    def snapshot(self) -> dict[str, Any]:
        """Return all metrics as plain data for /stats, with more counts and the longest durations since the start."""
        self._there = self._gateway()
        http: dict[str, Any] = {
            "requests_accepted": self._all("num_accepted"),
            "requests_finished": self._all_finished(),
            "requests_in_flight": self._peak("in_flight", self._in_flight),
            "requests_queued": self._peak("queued", self._queued),
            "generated_tokens": self._all("num_generated"),
            "requests_shortened": self._num_shortened,
            "cpu_s": cpu_seconds(),
            "resident_bytes": resident_bytes(),
            "meters": {name: _meter(reading) for name, reading in self._meter_readings().items()},
        }
        if self._keys:
            http["keys"] = {one.name: _of_key(one) for one in self._all_keys()}
        if (there := self._there) is not None:
            http["gateway"] = shown(there)
        now = time.monotonic()
        engines = [{**view.told(now), "stats": _engine(view.stats)} for view in self._engines()]
        pool = self._pool()
        return {
            "http": http,
            "engine": _engine(self._stats()),
            "engines": engines,
            "pool": None if pool is None else dict(pool),
        }


def _engine(stats: EngineStats | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__}
    fields["ranks"] = [_plain(one) for one in stats.ranks]
    fields["prefixes"] = [_plain(one) for one in stats.prefixes]
    fields["meters"] = {name: _meter(reading) for name, reading in stats.meters.items()}
    return fields


def _meter(reading: MeterReading) -> dict[str, float]:
    """Return a meter's reading as plain data, with percentiles in place of its buckets."""
    fields = _plain(reading)
    del fields["spread"]
    return {**fields, **percentiles(reading.spread, reading.longest_s)}


def _of_key(counts: KeyCounts) -> dict[str, Any]:
    return {
        "requests": counts.num_requests,
        "prompt_tokens": counts.num_prompt,
        "generated_tokens": counts.num_generated,
        "refused": counts.refused,
    }


def _plain(reading: msgspec.Struct) -> dict[str, float]:
    return {name: getattr(reading, name) for name in reading.__struct_fields__}
