"""Meters, laps, collections, lag, histograms and measured messages: they count what happened, and only that."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from minisgl.message import (
    AbortRequest,
    Codec,
    EngineStats,
    Heartbeat,
    MeasuredCodec,
    MessageError,
    decode_from_engine,
    sent_ns,
    stamped,
)
from minisgl.metrics import meters
from minisgl.metrics.chrome_trace import DEVICE, LOOP, ChromeTrace
from minisgl.metrics.histogram import Histogram
from minisgl.metrics.lag import LoopLag
from minisgl.metrics.meters import GcWatch, Meter, Meters, cpu_seconds, resident_bytes
from minisgl.metrics.server_metrics import Metrics
from minisgl.metrics.spread import SpreadMeter, bucket, histogram, lower_ns, percentiles
from minisgl.metrics.steps import PHASES, StepTimers, step_timers
from minisgl.scheduler.api import ControlPlaneConfig, metadata_time_ns
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.shadow import ShadowControlPlane
from minisgl.scheduler.trace import RecordingControlPlane
from minisgl.step import Arrival, Events
from tests.helpers.sim import Sim, constant, request


def test_a_meter_counts() -> None:
    meter = Meter("m")
    meter.add(2_000_000_000)
    meter.add(5_000_000_000, count=3)
    assert (found := meter.reading()).count == 4 and found.total_s == 7
    assert found.longest_s == found.recent_s == 5


def test_recent_forgets_and_longest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: now)
    found = Meters(("m",))
    found["m"].add(7_000_000_000)
    for expected in (7, 7, 0):  # in its window, in the one after it, then no more
        now += meters.WINDOW_NS
        assert found.readings()["m"].recent_s == expected
        assert found.readings()["m"].longest_s == 7
    found["m"].add(1_000_000_000)
    assert found.readings()["m"].recent_s == 1


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


def test_the_most_of_something_outlives_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, there = 0, 3
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: now)
    peak = meters.Peak(lambda: there)
    peak.see()
    for there, expected in ((2, 3), (1, 3), (1, 2), (0, 1)):  # each window begins with what is there
        now += meters.WINDOW_NS
        assert peak.read() == {"now": there, "recent": expected, "most": 3}


def test_writing_the_arrays_of_a_step_has_a_meter_of_its_own(each_control_plane: str) -> None:
    """Both control planes, and one behind others that record and compare."""
    config = ControlPlaneConfig(
        num_pages=64, page_size=16, max_running_requests=8, max_prefill_length=64, context_len=99
    )
    inner = make_control_plane(each_control_plane, config)
    plane = RecordingControlPlane(ShadowControlPlane(inner, make_control_plane("python", config)), config, io.BytesIO())
    assert metadata_time_ns(plane) == 0
    tokens = np.arange(40, dtype=np.int32)
    began = time.perf_counter_ns()
    inner.schedule(0, Events([Arrival(req_id=1, tokens=tokens, num_prompt=40, max_tokens=5)]))
    passed = time.perf_counter_ns() - began
    assert 0 < metadata_time_ns(inner) < passed and metadata_time_ns(plane) == metadata_time_ns(inner)


def test_the_loop_meters_that_time_in_every_step() -> None:
    sim = Sim(constant(1.0))
    sim.run([request(i, 20, 30) for i in range(6)])
    found = sim.loop.timers.meters.readings()
    assert found["metadata"].count == sim.loop.num_steps
    assert 0 < found["metadata"].total_s < found["schedule"].total_s
    assert sum(found["schedule"].spread.values()) == sim.loop.num_steps


def test_laps_add_up_to_the_clock() -> None:
    """A whole run of the loop: nothing falls between two phases, nothing is counted twice."""
    sim = Sim(constant(1.0))
    timers = sim.loop.timers
    timers.begin()
    began = time.perf_counter_ns()
    sim.run([request(i, 20, 30) for i in range(6)])
    passed = (time.perf_counter_ns() - began) / 1e9
    found = timers.meters.readings()
    counted = sum(found[phase].total_s for phase in PHASES)
    assert 0.5 * passed < counted <= passed * 1.01
    steps = sim.loop.num_steps
    assert found["schedule"].count == found["launch"].count == steps
    assert found["wait"].count == found["commit"].count == found["send"].count == found["pause"].count == steps
    assert all(found[phase].total_s > 0 for phase in ("schedule", "launch", "wait", "commit", "send"))
    assert found["pause"].total_s <= passed


def test_rows_and_tokens_of_steps_are_counted() -> None:
    sim = Sim()
    sim.loop.step([request(0, 20, 5), request(1, 7, 5)])
    assert sim.loop.timers.last_rows == 2
    sim.run(())
    assert sim.loop.timers.num_tokens == 20 + 4 + 7 + 4
    assert sim.loop.timers.num_rows == 10 and sim.loop.timers.last_rows == 0


def test_a_pause_is_work_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: now)
    timers = StepTimers()
    now = 30
    timers.lap(timers.schedule)
    now = 50
    timers.rest()
    now = 1000
    timers.awake(timers.wait)
    now = 1007
    timers.rest()
    pause = timers.meters["pause"]
    assert (pause.count, pause.total_ns) == (2, 57)
    assert timers.schedule.total_ns == 30 and timers.wait.total_ns == 970


def test_collections_are_watched_until_the_end() -> None:
    meter = Meter("gc")
    watch = GcWatch(meter)
    watch.start()
    gc.collect()
    seen = meter.count
    assert seen >= 1 and meter.total_ns > 0
    watch.stop()
    watch.stop()
    gc.collect()
    assert meter.count == seen


def test_a_blocked_event_loop_shows() -> None:
    meter = Meter("pause")

    async def run() -> None:
        lag = LoopLag(meter, lambda: True)
        lag.start()
        await asyncio.sleep(0)
        time.sleep(0.08)  # the pause that must be seen
        while not meter.count:
            await asyncio.sleep(0)
        lag.stop()
        seen = meter.count
        await asyncio.sleep(0.03)
        assert meter.count == seen

    asyncio.run(run())
    assert meter.reading().longest_s > 0.06


def test_usage_of_this_process() -> None:
    before = cpu_seconds()
    sum(range(300_000))
    assert cpu_seconds() > before
    assert 10 * 2**20 < resident_bytes() < 64 * 2**30


@pytest.mark.parametrize(
    "values", [[], [0.001, 0.0011, 7, 1e9, 0], list(np.random.default_rng(0).exponential(0.2, 500))]
)
def test_a_histogram_is_that_of_the_client_library(values: list[float]) -> None:
    bounds = (0.001, 0.1, 1.0, 300.0)
    ours = Histogram("h_seconds", "text", bounds)
    theirs = TheirHistogram("h_seconds", "text", registry=None, buckets=bounds)
    for value in values:
        ours.observe(value)
        theirs.observe(value)

    def samples(source: object) -> dict[tuple[str, ...], float]:
        family = source.collect()  # type: ignore[attr-defined]
        family = family if hasattr(family, "samples") else next(iter(family))
        return {
            (one.name, *one.labels.values()): one.value for one in family.samples if not one.name.endswith("_created")
        }

    found, expected = samples(ours), samples(theirs)
    assert found.pop(("h_seconds_sum",)) == pytest.approx(expected.pop(("h_seconds_sum",)))
    assert found == expected


def test_several_at_once() -> None:
    one, many = (Histogram("h", "text", (1.0, 2.0)) for _ in range(2))
    for _ in range(3):
        one.observe(1.5)
    many.observe(1.5, 3)
    assert one.collect() == many.collect()


def test_measured_frames_are_read_by_both_sides() -> None:
    found = Meters(("encode", "decode", "queue"))
    measured = MeasuredCodec(*(found[name] for name in ("encode", "decode", "queue")))
    for sender in (Codec(), measured):
        for receiver in (Codec(), measured):
            assert receiver.decode_from_engine(sender.encode([Heartbeat("idle", 1.0)])) == [Heartbeat("idle", 1.0)]
            assert receiver.decode_to_engine(sender.encode([AbortRequest(3)])) == [AbortRequest(3)]
    counts = [found[name].count for name in ("encode", "decode", "queue")]
    assert counts == [4, 4, 2]  # only a stamped frame says how long it was on the way
    assert found["queue"].total_ns > 0


def test_the_time_on_the_way_is_measured() -> None:
    queue = Meter("queue")
    codec = MeasuredCodec(Meter("encode"), Meter("decode"), queue)
    frame = Codec().encode([Heartbeat("idle", 1.0)])
    codec.decode_from_engine(stamped(frame, time.monotonic_ns() - 3_000_000_000))
    assert 3 < queue.reading().total_s < 60
    assert sent_ns(frame) is None and sent_ns(stamped(frame, 77)) == 77


def test_a_stamped_frame_of_another_version_is_refused() -> None:
    frame = stamped(Codec().encode([]), 5)
    with pytest.raises(MessageError):
        decode_from_engine(bytes([frame[0] ^ 1]) + frame[1:])


def test_a_chrome_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sim = Sim(constant(10.0))
    sim.loop.timers = step_timers(3, said.append)
    sim.run([request(0, 3, 10)])
    file = tmp_path / f"minisgl-profile-engine-{os.getpid()}.json"
    assert len(said) == 1 and file.name in said[0]
    events = json.loads(file.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["pid"] == os.getpid() for event in complete)
    forwards = [event for event in complete if event["tid"] == DEVICE]
    assert [event["args"]["step"] for event in forwards] == [0, 1, 2]
    assert [event["dur"] for event in forwards] == [pytest.approx(10_000)] * 3
    for phase in ("schedule", "launch", "wait", "commit", "send"):
        steps = [event["args"]["step"] for event in complete if event["tid"] == LOOP and event["name"] == phase]
        assert steps[:3] == [0, 1, 2], phase
    loop = sorted((e["ts"], e["dur"]) for e in complete if e["tid"] == LOOP)
    assert all(a + d <= b + 0.01 for (a, d), (b, _) in itertools.pairwise(loop))  # none overlaps the next


def test_a_trace_that_ends_early_or_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sim = Sim()
    sim.loop.timers = step_timers(1000, said.append)
    sim.run([request(0, 3, 4)])
    assert not said
    sim.loop.timers.close()
    sim.loop.timers.close()
    assert len(said) == 1 and len(list(tmp_path.iterdir())) == 1
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    sim = Sim()
    sim.loop.timers = step_timers(2, said.append)
    gone.rmdir()
    sim.run([request(0, 3, 4)])
    assert len(said) == 2 and "cannot be written" in said[1] and len(sim.tokens[0]) == 4


def test_the_event_loop_in_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    metrics = Metrics(lambda: None, lambda: None, lambda: True, trace=ChromeTrace(2, "http", said.append))
    for _ in range(2):
        metrics.tokenize.add(1_000_000)
        metrics.detokenize.add(5)
        metrics.dispatch.add(2_000_000)
    (file,) = tmp_path.iterdir()
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["dur"]) for event in events] == 2 * [("tokenize", 1000), ("dispatch", 2000)]
    assert metrics.dispatch.count == 2 and metrics.dispatch.total_ns == 4_000_000


def _stats() -> EngineStats:
    sim = Sim()
    sim.run([request(0, 3, 4)])
    readings = sim.loop.timers.meters.readings()
    return EngineStats(2, 3, 64, 40, 8, 10, 6, 5, 700, 300, 900, meters=readings, cpu_s=1.5, resident_bytes=7)


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
    assert len(aliases) == 17
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
