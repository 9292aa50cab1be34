"""Where a step's time goes: laps, pauses, rows and tokens."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from minisgl.metrics import meters
from minisgl.metrics.server_metrics import Metrics
from minisgl.metrics.steps import DEVICE, LOOP, PHASES, ChromeTrace, StepTimers, step_timers
from minisgl.scheduler.api import ControlPlaneConfig, metadata_time_ns
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.shadow import ShadowControlPlane
from minisgl.scheduler.trace import RecordingControlPlane
from minisgl.step import Arrival, Events
from tests.helpers.sim import Sim, constant, request


def test_writing_the_arrays_of_a_step_has_a_meter_of_its_own(each_control_plane: str) -> None:
    """Both schedulers, and one behind others that record and compare."""
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


def test_laps_add_up_to_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run of the loop, by a clock that each look moves on: nothing falls between two phases, nothing is counted
    twice."""
    looks = itertools.count(step=1_000_000)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(looks))
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


def test_a_chrome_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    sim = Sim(constant(10.0), timers=step_timers(3, said.append))
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
    sim = Sim(timers=step_timers(1000, said.append))
    sim.run([request(0, 3, 4)])
    assert not said
    sim.loop.timers.close()
    sim.loop.timers.close()
    assert len(said) == 1 and len(list(tmp_path.iterdir())) == 1
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    sim = Sim(timers=step_timers(2, said.append))
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
