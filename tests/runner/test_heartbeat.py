"""Heartbeats of a real step loop: what they say while a forward runs, and while the loop itself hangs."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import zmq

from minisgl.config import EngineConfig
from minisgl.engine.api import Engine, SlotBinding, StepHandle, StepResult
from minisgl.message import AddRequest, EngineReady, FromEngine, Heartbeat, decode_from_engine
from minisgl.runner import process
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.heartbeat import HeartbeatThread, Pulse
from minisgl.runner.loop import StepLoop
from minisgl.runner.process_config import ProcessConfig
from minisgl.sampling_params import SamplingParams
from minisgl.step import Events, StepBuffers, StepPlan

CONFIG = EngineConfig(cpu_backend="python", engine="echo", num_pages=16, page_size=4)
WAIT_S = 60.0


@pytest.fixture
def beats() -> Iterator[tuple[Pulse, Callable[[], Heartbeat]]]:
    """A pulse that is being sent, and the next beat of it."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        address = f"ipc://{folder}/beats"
        inbox.bind(address)
        pulse = Pulse()
        thread = HeartbeatThread(context, address, pulse)

        def next_beat() -> Heartbeat:
            assert inbox.poll(WAIT_S * 1000), "no beat"
            (found,) = decode_from_engine(inbox.recv())
            assert isinstance(found, Heartbeat)
            return found

        try:
            yield pulse, next_beat
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
        self._engine = engine
        self._hook = hook

    def launch(self, plan: StepPlan, buffers: StepBuffers, bindings: Sequence[SlotBinding]) -> StepHandle:
        handle, hook = self._engine.launch(plan, buffers, bindings), self._hook

        class Slow:
            def wait(self) -> StepResult:
                hook.hold()
                return handle.wait()

        return Slow()


REQUEST = AddRequest(1, np.arange(5, dtype=np.int32).tobytes(), SamplingParams(max_tokens=4, seed=1, ignore_eos=True))


@pytest.mark.parametrize("where", ["forward", "working"])
def test_a_beat_tells_a_long_forward_from_a_stuck_loop(
    beats: tuple[Pulse, Callable[[], Heartbeat]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse, next_beat = beats
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
    loop = StepLoop(control_plane, driven, lambda messages: None, overlap=False, pulse=pulse)
    pulse.enter("working")
    thread = threading.Thread(target=loop.step, args=([REQUEST],))
    thread.start()
    try:
        assert hook.reached.wait(WAIT_S)
        pulses = [next_beat() for _ in range(3)][1:]  # the first one may be from before
        assert [one.phase for one in pulses] == [where, where]
        assert pulses[0].age_s < pulses[1].age_s  # the same pause goes on
    finally:
        hook.release.set()
        thread.join(WAIT_S)
        engine.close()


def test_loading_is_no_stuck_loop(
    beats: tuple[Pulse, Callable[[], Heartbeat]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats from a long load may be read after the engine is ready: they must not say that its loop hangs."""
    pulse, next_beat = beats
    assert next_beat().phase == "idle"
    seen: list[str] = []

    class Link:
        def __init__(self) -> None:
            self.pulse = pulse
            self.timers = process.step_timers(0, lambda text: None)

        def narrate(self, lines: Sequence[str]) -> None:
            pass

        def send(self, messages: Sequence[FromEngine]) -> None:
            if isinstance(messages[0], EngineReady):
                seen.append(pulse.beat().phase)

    monkeypatch.setattr(process, "_run", lambda *rest: None)
    monkeypatch.setattr(process.gc, "freeze", lambda: None)
    config = ProcessConfig(to_engine="ipc://none", from_engine="ipc://none/x", engine=CONFIG)
    process.serve(config, cast("process.Link", Link()))
    assert seen == ["working"], "from then on a loop that does not begin is a hang"
