"""The step loop's time: laps that follow each other without a gap, so that the phases add up to the clock; and a trace
of steps as a JSON file that chrome://tracing, Perfetto and speedscope open, one per process (Trace Event Format,
"complete" events with times in microseconds, on one clock, so that the files can be merged).

Invariants: a lap costs one reading of the clock and a few additions; nothing is stored per step unless a trace is
requested, which stops after the requested number of steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisgl.metrics.meters import Meter, Meters, SpreadMeter

LOOP, DEVICE = 1, 2  # thread ids of a trace: the step loop, and the engine's forwards


class ChromeTrace:
    """A trace of events until `num_steps` steps with rows are done; then it writes its file and logs the name."""

    def __init__(self, num_steps: int, process: str, say: Callable[[str], None]) -> None:
        """Begin a trace whose file is `minisgl-profile-PROCESS-PID.json` in the current folder."""
        self._left = num_steps
        self._process = process
        self._path = Path(f"minisgl-profile-{process}-{os.getpid()}.json")
        self._say = say
        self._events: list[tuple[int, str, int, int, int]] = []

    def add(self, name: str, start_ns: int, end_ns: int, step: int, *, thread: int = LOOP) -> None:
        """Add an event from `start_ns` to `end_ns` of `time.perf_counter_ns`. `step` is -1 if it belongs to no step."""
        if self._left:
            self._events.append((thread, name, start_ns, end_ns, step))

    def forward(self, span: tuple[float, float], step: int) -> None:
        """Add the forward of a step that was committed and sent; `span`: begin and end by `time.perf_counter`."""
        self.add("forward", int(span[0] * 1e9), int(span[1] * 1e9), step, thread=DEVICE)
        self.step_done()

    def step_done(self) -> None:
        """Count a step with rows that was committed and sent; write the file after the last one."""
        if self._left:
            self._left -= 1
            if not self._left:
                self.write()

    def write(self) -> None:
        """Write the events so far, once: when all steps are done or the process ends."""
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
        records: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"minisgl {self._process}"}}
        ]
        for thread in sorted({event[0] for event in events}):
            name = "forward" if thread == DEVICE else "loop"
            records.append({"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": name}})
        for thread, name, start, end, step in events:
            event = {"ph": "X", "pid": pid, "tid": thread, "name": name, "ts": start / 1e3, "dur": (end - start) / 1e3}
            records.append(event if step < 0 else {**event, "args": {"step": step}})
        return records


class TracedMeter(Meter):
    """A meter whose additions, made when things end, are also events of `trace`; with `ends_step` also steps."""

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


PHASES = ("idle", "receive", "schedule", "launch", "wait", "commit", "send")
WITHIN = ("metadata",)  # the part of schedule that writes a step's arrays
OTHERS = ("pause", "gc", "encode", "decode", "queue")


class StepTimers:
    """The step loop's meters. `pause` meters how long the loop works without waiting for the engine or for messages:
    nothing else is served meanwhile. `gc`, `encode`, `decode` and `queue` are added to by other code."""

    def __init__(self, trace: ChromeTrace | None = None) -> None:
        self.meters = Meters((*PHASES, *WITHIN, *OTHERS), _meter)
        self.idle, self.receive, self.schedule, self.launch, self.wait, self.commit, self.send = map(
            self.meters.__getitem__, PHASES
        )
        self.metadata = self.meters["metadata"]
        self._pause = self.meters["pause"]
        self.trace = trace
        self.num_rows = 0
        self.num_tokens = 0
        self.last_rows = 0
        self._last = self._awake = time.perf_counter_ns()

    def begin(self) -> None:
        """Start the clock: the time until now belongs to no phase."""
        self._last = self._awake = time.perf_counter_ns()

    def lap(self, phase: Meter, step: int = -1) -> None:
        """Add the time since the last lap to `phase`."""
        now = time.perf_counter_ns()
        phase.add(now - self._last)
        if self.trace is not None:
            self.trace.add(phase.name, self._last, now, step)
        self._last = now

    def rest(self) -> None:
        """Mark the beginning of a wait: the next lap is that wait, and ends with `awake`."""
        self._pause.add(time.perf_counter_ns() - self._awake)

    def awake(self, phase: Meter, step: int = -1) -> None:
        """Add a wait to `phase`, like `lap`, and start the time of the next pause."""
        self.lap(phase, step)
        self._awake = self._last

    def close(self) -> None:
        """Write the unfinished trace, if there is one. Idempotent."""
        if self.trace is not None:
            self.trace.write()

    def scheduled(self, rows: int, tokens: int) -> None:
        """Count a launched step with its rows and tokens."""
        self.num_rows += rows
        self.num_tokens += tokens
        self.last_rows = rows


def _meter(name: str) -> Meter:
    return Meter(name) if name in OTHERS else SpreadMeter(name)


def step_timers(profile_steps: int, say: Callable[[str], None]) -> StepTimers:
    """Return the step loop's timers, with a trace of the first `profile_steps` steps, whose file `say` logs."""
    if not profile_steps:
        return StepTimers()
    return StepTimers(ChromeTrace(profile_steps, "engine", say))
