"""Who does not get on, told from beats and a clock; and a worker's loop, on an engine that is only pretended."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.engine.api import EngineStepError, StepResult
from minisgl.runner import worker
from minisgl.runner.rank_messages import RankBeat, RankStep, Stop, ToRank, encode, pack, sizes_of
from minisgl.runner.rank_pulse import INTERVAL_S, RankWatch, StepClock
from minisgl.runner.worker import work
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import Events

PLANE = ControlPlaneConfig(40, 4, 8, 24, 150, (256,))
LIMIT_S = 10.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(step: int = -1, age_s: float = 0.0) -> RankBeat:
    return RankBeat(step, age_s, 1.5, 7)


class Watched:
    """Two ranks that beat every interval, and rank 0, which looks as often."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watch = RankWatch(2, LIMIT_S, self.clock)
        self.watch.trouble()

    def go(self, seconds: float, beats: dict[int, Any]) -> str:
        """The first trouble, looking on for so long; `beats[rank]` is given the time since the start."""
        for turn in range(1, round(seconds / INTERVAL_S) + 1):
            self.clock.now += INTERVAL_S
            for rank, of in beats.items():
                self.watch.hear(rank, of(turn * INTERVAL_S))
            if found := self.watch.trouble():
                return found
        return ""


def idle(_: float) -> RankBeat:
    return beat()


def stuck(seconds: float) -> RankBeat:
    return beat(17, seconds)


def test_ranks_that_say_something_are_well_however_long_nothing_is_asked() -> None:
    assert not Watched().go(1000, {1: idle, 2: idle})


def test_a_rank_that_says_nothing_is_named_after_the_limit() -> None:
    watched = Watched()
    assert not watched.go(LIMIT_S, {1: idle})
    assert (
        watched.go(1, {1: idle}) == "tensor-parallel rank 2 said nothing for 10.5 s, the limit is 10 (--step-timeout)"
    )


def test_who_only_waits_for_the_silent_one_is_not_named() -> None:
    found = Watched().go(LIMIT_S + 1, {1: stuck})
    assert found.startswith("tensor-parallel rank 2 said nothing for ")


def test_ranks_that_do_not_finish_a_step_are_named() -> None:
    found = Watched().go(LIMIT_S + 1, {1: stuck, 2: stuck})
    assert found == "tensor-parallel ranks 1, 2 did not finish step 17 in 10.5 s, the limit is 10 (--step-timeout)"
    only = Watched().go(LIMIT_S + 1, {1: idle, 2: stuck})
    assert only.startswith("tensor-parallel rank 2 did not finish step 17 in 10.5 s")


def test_time_in_which_rank_0_stood_still_counts_for_nobody() -> None:
    """Nobody beat, as far as it knows; the ranks waited for it."""
    watched = Watched()
    watched.clock.now += 1000
    assert not watched.watch.trouble()
    watched.watch.hear(1, beat(17, 1000.0))
    watched.watch.hear(2, beat(17, 1000.0))
    watched.clock.now += INTERVAL_S
    assert not watched.watch.trouble()
    found = watched.go(LIMIT_S + 1, {1: lambda s: beat(17, 1000 + s), 2: lambda s: beat(17, 1000 + s)})
    assert "did not finish step 17 in 10.5 s" in found


def test_a_short_limit_does_not_take_the_time_between_beats_for_silence() -> None:
    watched = Watched()
    watched.watch._limit_s = 0.1
    assert not watched.go(10, {1: idle, 2: idle})
    assert watched.watch.look_every_s < 0.1


def test_usage_is_what_was_said_last() -> None:
    watched = Watched()
    watched.go(1, {2: idle})
    first, second = watched.watch.usage()
    assert (first.rank, first.cpu_s, first.resident_bytes) == (1, 0.0, 0)
    assert (second.rank, second.cpu_s, second.resident_bytes) == (2, 1.5, 7)


def test_a_steps_age_counts_from_its_turn() -> None:
    now = Clock()
    clock = StepClock(now)
    assert clock.oldest() == (-1, 0.0)
    clock.begin(4)
    clock.begin(5)
    now.now += 3
    assert clock.oldest() == (4, 3.0)
    clock.end()
    assert clock.oldest() == (5, 0.0)
    now.now += 2
    assert clock.oldest() == (5, 2.0)
    clock.end()
    assert clock.oldest() == (-1, 0.0)


def test_a_beat_says_what_the_rank_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Received, and not finished: also while the launch itself hangs."""
    said: list[Any] = []
    frames, nothing = iter([encode(steps([0])[1])]), threading.Event()
    inbox = SimpleNamespace(recv=lambda: next(frames, None) or nothing.wait())
    jobs: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    clock = StepClock()
    threading.Thread(target=worker._receive, args=(inbox, jobs, clock), daemon=True).start()
    assert isinstance(jobs.get(timeout=30), RankStep)
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker._beat(clock, said.append)
    (beat,) = said
    assert beat.step == 0 and beat.age_s > 0 and beat.cpu_s > 0 and beat.resident_bytes > 2**20


# ------------------------------------------------------------------------------------------------------ worker's loop


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
    clock, acks = StepClock(), list[int]()
    for message in [*messages, *([Stop()] if stop else [])]:
        if isinstance(message, RankStep):
            clock.begin(message.step)
        jobs.put(message)

    def launched(step: int) -> None:
        acks.append(step)
        engine.log.append(f"ack {step}")

    work(engine, jobs, launched, clock)  # type: ignore[arg-type]
    assert clock.oldest() == (-1, 0.0)
    return acks


def test_as_many_steps_are_in_flight_as_rank_0_had() -> None:
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
