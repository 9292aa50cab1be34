"""A trace of steps as a JSON file that chrome://tracing, Perfetto and speedscope open, one for each process. Times are
on one clock, so that one file may hold the events of both.

Invariants: memory is bounded: it stops after as many steps as it was asked for. Format: Trace Event Format, "complete"
events (ph X) with times in microseconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisgl.metrics.meters import Meter

LOOP, DEVICE = 1, 2  # thread ids: what the step loop does, what the engine computes meanwhile


class ChromeTrace:
    """Collects until the first `num_steps` steps with rows are done, then writes its file and says so."""

    def __init__(self, num_steps: int, process: str, say: Callable[[str], None]) -> None:
        """The file is `minisgl-profile-PROCESS-PID.json` in the current folder."""
        self._left = num_steps
        self._process = process
        self._path = Path(f"minisgl-profile-{process}-{os.getpid()}.json")
        self._say = say
        self._events: list[tuple[int, str, int, int, int]] = []

    def add(self, name: str, start_ns: int, end_ns: int, step: int, *, thread: int = LOOP) -> None:
        """Something that took from `start_ns` to `end_ns` of `time.perf_counter_ns`; `step` -1: of no step."""
        if self._left:
            self._events.append((thread, name, start_ns, end_ns, step))

    def forward(self, span: tuple[float, float], step: int) -> None:
        """A step with rows was committed and sent; its forward took `span`, seconds of `time.perf_counter`."""
        self.add("forward", int(span[0] * 1e9), int(span[1] * 1e9), step, thread=DEVICE)
        self.step_done()

    def step_done(self) -> None:
        """A step with rows was committed and sent."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.write()

    def write(self) -> None:
        """What there is so far, once: when all steps are done or the process ends."""
        self._left = 0
        events, self._events = self._events, []
        if not events:
            return
        try:
            self._path.write_text(json.dumps({"traceEvents": self._as_json(events), "displayTimeUnit": "ms"}))
        except OSError as error:
            self._say(f"--profile-steps: {self._path.name} cannot be written: {error.strerror}")
            return
        self._say(f"--profile-steps: wrote {self._path.name}: open it with Perfetto or chrome://tracing")

    def _as_json(self, events: list[tuple[int, str, int, int, int]]) -> list[dict[str, Any]]:
        pid = os.getpid()
        found: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"minisgl {self._process}"}}
        ]
        for thread in sorted({event[0] for event in events}):
            name = "forward" if thread == DEVICE else "loop"
            found.append({"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": name}})
        for thread, name, start, end, step in events:
            event = {"ph": "X", "pid": pid, "tid": thread, "name": name, "ts": start / 1e3, "dur": (end - start) / 1e3}
            found.append(event if step < 0 else {**event, "args": {"step": step}})
        return found


class TracedMeter(Meter):
    """A meter whose additions, made as things end, are events of `trace` too. Each ends a step with `ends_step`."""

    __slots__ = ("_ends_step", "_trace")

    def __init__(self, name: str, trace: ChromeTrace, *, ends_step: bool = False) -> None:
        super().__init__(name)
        self._trace = trace
        self._ends_step = ends_step

    def add(self, ns: int, count: int = 1) -> None:
        super().add(ns, count)
        now = time.perf_counter_ns()
        self._trace.add(self.name, now - ns, now, -1)
        if self._ends_step:
            self._trace.step_done()
