"""Heartbeats of a real step loop, while a forward runs and while the loop itself hangs; and who does not get on, by
heartbeats and a clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.engine.api import Engine, SlotAssignment, StepHandle, StepResult
from minisgl.message import AddRequest, EngineReady, FromEngine, Heartbeat
from minisgl.message.heartbeat import TIMES, Activity, HeartbeatThread, Watchdog, poll_interval_s
from minisgl.runner import process
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.intake import LoopSettings
from minisgl.runner.launch import ProcessConfig
from minisgl.runner.loop import StepLoop, Timing
from minisgl.runner.ranks import ranks_named
from minisgl.sampling_params import SamplingParams
from minisgl.step import Events, StepBuffers, StepPlan
from tests.helpers.seconds import WAIT_S

CONFIG = EngineConfig(cpu_backend="python", engine="echo", num_pages=16, page_size=4)


@pytest.fixture
def beats() -> Iterator[tuple[Activity, Callable[[], Heartbeat]]]:
    """An activity whose heartbeats are sent, and the next of them."""
    activity = Activity()
    sent: SimpleQueue[Heartbeat] = SimpleQueue()
    thread = HeartbeatThread(activity.heartbeat, contextlib.nullcontext(sent.put))
    try:
        yield activity, lambda: sent.get(timeout=WAIT_S)
    finally:
        thread.close()


class _Hook:
    """Holds whoever comes by until `release`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self.release.wait(WAIT_S)


class _SlowEngine:
    """An engine whose first forward takes until it is released."""

    def __init__(self, engine: Engine, hook: _Hook) -> None:
        self._engine, self.info = engine, engine.info
        self._hook = hook

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        handle, hook = self._engine.launch(plan, buffers, assignments), self._hook

        class Slow:
            def wait(self) -> StepResult:
                hook.hold()
                return handle.wait()

        return Slow()


REQUEST = AddRequest(1, np.arange(5, dtype=np.int32).tobytes(), SamplingParams(max_tokens=4, seed=1, ignore_eos=True))


@pytest.mark.parametrize("where", ["forward", "working"])
def test_a_heartbeat_tells_a_long_forward_from_a_stuck_loop(
    beats: tuple[Activity, Callable[[], Heartbeat]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    activity, next_beat = beats
    hook = _Hook()
    engine = build_engine(CONFIG, lambda text: None)
    control_plane = build_control_plane(CONFIG, engine.info)
    driven: Engine = engine
    if where == "forward":
        driven = _SlowEngine(engine, hook)  # type: ignore[assignment]
    else:
        schedule = control_plane.schedule

        def stuck(step: int, events: Events) -> StepPlan:
            hook.hold()
            return schedule(step, events)

        monkeypatch.setattr(control_plane, "schedule", stuck)
    loop = StepLoop(
        control_plane,
        driven,
        lambda messages: None,
        settings=LoopSettings(overlap=False),
        timing=Timing(activity=activity),
    )
    activity.enter("working")
    thread = threading.Thread(target=loop.step, args=([REQUEST],))
    thread.start()
    try:
        assert hook.reached.wait(WAIT_S)
        found = [next_beat() for _ in range(3)][1:]  # the first one may be from before
        assert [(one.phase, one.step) for one in found] == [(where, 0 if where == "forward" else -1)] * 2
        assert found[0].age_s < found[1].age_s  # the same pause goes on
    finally:
        hook.release.set()
        thread.join(WAIT_S)
        engine.close()


def test_loading_is_no_stuck_loop(
    beats: tuple[Activity, Callable[[], Heartbeat]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats from a long load may be read after the engine is ready: they must not say that its loop hangs."""
    activity, next_beat = beats
    assert next_beat().phase == "idle"
    seen: list[str] = []

    class Link:
        def __init__(self) -> None:
            self.activity = activity
            self.timers = process.step_timers(0, lambda text: None)

        def narrate(self, lines: Sequence[str]) -> None:
            pass

        def wake(self) -> None:
            pass

        def send(self, messages: Sequence[FromEngine]) -> None:
            if isinstance(messages[0], EngineReady):
                seen.append(activity.heartbeat().phase)

    monkeypatch.setattr(process, "_run", lambda *rest: None)
    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    config = ProcessConfig(address="ipc://none/engine", engine=CONFIG)
    process.serve(config, cast("process.Link", Link()))
    assert seen == ["working"], "from then on a loop that does not begin is a hang"


# -------------------------------------------------------------------------------------------------- watchdog of ranks


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def beat(step: int = -1, age_s: float = 0.0) -> Heartbeat:
    return Heartbeat("idle" if step < 0 else "forward", age_s, step, 1.5, 7)


LIMIT_S = 10.0


class Watched:
    """Two ranks that beat every interval, and rank 0, which looks as often."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.limit_s = LIMIT_S
        self.watchdog = Watchdog([1, 2], ranks_named, clock=self.clock)
        self.poll()

    def poll(self) -> str:
        return self.watchdog.poll(self.limit_s)

    def go(self, seconds: float, beats: dict[int, Any]) -> str:
        """The first trouble, looking on for so long; `beats[rank]` is given the time since the start."""
        for turn in range(1, round(seconds / TIMES.interval_s) + 1):
            self.clock.now += TIMES.interval_s
            for rank, of in beats.items():
                self.watchdog.on_heartbeat(rank, of(turn * TIMES.interval_s))
            if found := self.poll():
                return found
        return ""


def idle(_: float) -> Heartbeat:
    return beat()


def stuck(seconds: float) -> Heartbeat:
    return beat(17, seconds)


def test_ranks_that_say_something_are_well_however_long_nothing_is_asked() -> None:
    assert not Watched().go(1000, {1: idle, 2: idle})


def test_a_rank_that_says_nothing_is_named_after_the_limit() -> None:
    watched = Watched()
    assert not watched.go(LIMIT_S, {1: idle})
    found = watched.go(1, {1: idle})
    assert found == "no heartbeat from tensor-parallel rank 2 for 10.5 s, the limit is 10 (--step-timeout)"


def test_a_rank_that_waits_for_the_silent_one_is_not_named() -> None:
    found = Watched().go(LIMIT_S + 1, {1: stuck})
    assert found.startswith("no heartbeat from tensor-parallel rank 2 for ")


def test_ranks_that_do_not_finish_a_step_are_named() -> None:
    found = Watched().go(LIMIT_S + 1, {1: stuck, 2: stuck})
    assert found == "tensor-parallel ranks 1, 2 did not finish step 17 in 10.5 s, the limit is 10 (--step-timeout)"
    only = Watched().go(LIMIT_S + 1, {1: idle, 2: stuck})
    assert only.startswith("tensor-parallel rank 2 did not finish step 17 in 10.5 s")


def test_time_in_which_rank_0_was_suspended_does_not_count() -> None:
    """Nobody beat, as far as it knows; the ranks waited for it."""
    watched = Watched()
    watched.clock.now += 1000
    assert not watched.poll()
    watched.watchdog.on_heartbeat(1, beat(17, 1000.0))
    watched.watchdog.on_heartbeat(2, beat(17, 1000.0))
    watched.clock.now += TIMES.interval_s
    assert not watched.poll()
    found = watched.go(LIMIT_S + 1, {1: lambda s: beat(17, 1000 + s), 2: lambda s: beat(17, 1000 + s)})
    assert "did not finish step 17 in 10.5 s" in found


def test_a_short_limit_does_not_take_the_time_between_beats_for_silence() -> None:
    watched = Watched()
    watched.limit_s = 0.1
    assert not watched.go(10, {1: idle, 2: idle})
    assert poll_interval_s(0.1) < 0.1


def test_usage_is_that_of_the_last_heartbeat() -> None:
    watched = Watched()
    watched.go(1, {2: idle})
    beats = watched.watchdog.beats()
    assert (beats[1].cpu_s, beats[1].resident_bytes) == (0.0, 0)
    assert (beats[2].cpu_s, beats[2].resident_bytes) == (1.5, 7)


def test_the_first_heartbeat_waits_for_nothing() -> None:
    sent: list[Heartbeat] = []
    HeartbeatThread(lambda: Heartbeat("idle", 0.0), contextlib.nullcontext(sent.append)).close()
    assert len(sent) == 1
