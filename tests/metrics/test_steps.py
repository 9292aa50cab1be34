"""Where a step's time goes: laps, pauses, rows and tokens."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest

from minisgl.metrics import meters
from minisgl.metrics.steps import PHASES, StepTimers
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
