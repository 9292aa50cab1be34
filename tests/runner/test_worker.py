"""A worker's loop and its heartbeats, on an engine that is only pretended."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest

from minisgl.engine.api import EngineStepError, StepResult
from minisgl.message.heartbeat import Activity
from minisgl.runner import worker
from minisgl.runner.rank_messages import Stop, ToRank, encode, pack, sizes_of
from minisgl.runner.worker import heartbeat, work
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import Events
from tests.helpers.seconds import WAIT_S

PLANE = ControlPlaneConfig(40, 4, 8, 24, 150, (256,))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Pretended:
    """An engine whose steps end when `ready` says so, with an error where there is one; it writes down what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ready: set[int] = set()
        self.errors: dict[int, BaseException] = {}
        self.waited = threading.Event()

    def launch(self, plan: Any, buffers: Any, bindings: Any) -> Any:
        self.log.append(f"launch {plan.step}")
        return PretendedStep(self, plan.step)

    def close(self) -> None:
        self.log.append("close")


class PretendedStep:
    def __init__(self, engine: Pretended, step: int) -> None:
        self._engine, self._step = engine, step

    def wait(self) -> StepResult:
        self._engine.log.append(f"wait {self._step}")
        self._engine.waited.set()
        if (error := self._engine.errors.get(self._step)) is not None:
            raise error
        return StepResult(np.empty(0, np.int32))

    def done(self) -> bool:
        return self._step in self._engine.ready

    def span(self) -> tuple[float, float]:
        return 0.0, 0.0


def steps(in_flight: list[int]) -> list[ToRank]:
    plane = make_control_plane("python", PLANE)
    found: list[ToRank] = [sizes_of(plane.buffers)]
    for step, count in enumerate(in_flight):
        plan = plane.schedule(step, Events())
        plane.commit(step, np.empty(0, np.int32))
        found.append(pack(plan, plane.buffers, [], count))
    return found


def worked(engine: Pretended, messages: list[ToRank], *, stop: bool = True) -> list[int]:
    """Which steps were acknowledged."""
    jobs: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    activity, acks = Activity(), list[int]()
    for message in [*messages, *([Stop()] if stop else [])]:
        jobs.put(message)

    def launched(step: int) -> None:
        acks.append(step)
        engine.log.append(f"ack {step}")

    work(engine, jobs, launched, activity)  # type: ignore[arg-type]
    assert activity.heartbeat().phase == "idle"
    return acks


def test_a_rank_has_as_many_steps_in_flight_as_rank_0() -> None:
    engine = Pretended()
    assert worked(engine, steps([0, 1, 1, 0])) == [0, 1, 2, 3]
    assert engine.log == [
        *("launch 0", "ack 0", "launch 1", "ack 1"),  # rank 0 had not waited for 0
        *("wait 0", "launch 2", "ack 2", "wait 1", "wait 2", "launch 3", "ack 3", "wait 3"),
    ]


def test_a_step_that_is_done_is_not_kept() -> None:
    engine = Pretended()
    engine.ready = {0, 1}
    worked(engine, steps([0, 1]))
    assert engine.log == ["launch 0", "ack 0", "wait 0", "launch 1", "ack 1", "wait 1"]


def test_a_failed_step_is_every_ranks_and_the_loop_goes_on() -> None:
    engine = Pretended()
    engine.errors[0] = EngineStepError("not finite")
    assert worked(engine, steps([0, 1, 1])) == [0, 1, 2]


def test_an_error_is_noticed_though_no_other_step_comes() -> None:
    """As when rank 0 waits in a collective for this very rank."""
    engine = Pretended()
    engine.ready, engine.errors[1] = {1}, RuntimeError("an illegal memory access")
    engine.ready.add(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worked(engine, steps([0, 1]), stop=False)
    assert engine.waited.is_set()


def test_a_steps_age_counts_from_its_turn() -> None:
    """The one behind it is launched already, and waits for it."""
    clock = Clock()
    activity, said = Activity(clock), list[tuple[str, int, float]]()

    def at() -> None:
        beat = activity.heartbeat()
        said.append((beat.phase, beat.step, beat.age_s))

    class Slow(Pretended):
        def launch(self, plan: Any, buffers: Any, bindings: Any) -> Any:
            at()
            clock.now += 3
            return SlowStep(self, plan.step)

    class SlowStep(PretendedStep):
        def wait(self) -> StepResult:
            clock.now += 2
            at()
            return super().wait()

    jobs: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    for message in [*steps([0, 1]), Stop()]:
        jobs.put(message)
    assert activity.heartbeat().phase == "idle"
    work(Slow(), jobs, lambda step: None, activity)  # type: ignore[arg-type]
    assert said == [("forward", 0, 0.0), ("forward", 0, 3.0), ("forward", 0, 8.0), ("forward", 1, 2.0)]
    assert activity.heartbeat().phase == "idle"


def test_a_heartbeat_has_the_phase_of_the_rank() -> None:
    """Also while the launch itself hangs."""
    hangs, go_on = threading.Event(), threading.Event()

    class Hanging(Pretended):
        def launch(self, plan: Any, buffers: Any, bindings: Any) -> Any:
            hangs.set()
            assert go_on.wait(WAIT_S)
            return super().launch(plan, buffers, bindings)

    frames, nothing = iter([encode(message) for message in steps([0])]), threading.Event()
    inbox: Any = type("Inbox", (), {"recv": lambda self: next(frames, None) or nothing.wait()})()
    jobs: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=worker._receive, args=(inbox, jobs), daemon=True).start()
    activity = Activity()
    thread = threading.Thread(target=work, args=(Hanging(), jobs, lambda step: None, activity))
    thread.start()
    try:
        assert hangs.wait(WAIT_S)
        beat = heartbeat(activity)
        assert beat.phase == "forward" and beat.step == 0 and beat.age_s > 0
        assert beat.cpu_s > 0 and beat.resident_bytes > 2**20
    finally:
        go_on.set()
        jobs.put(Stop())
        thread.join(WAIT_S)
