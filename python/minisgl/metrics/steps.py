"""Where a step loop's time goes: laps that follow each other without a gap, so that the phases add up to the clock.

Invariants: a lap costs one reading of the clock and a few additions; nothing is kept per step unless a trace is asked
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from minisgl.metrics.chrome_trace import ChromeTrace
from minisgl.metrics.meters import Meter, Meters
from minisgl.metrics.spread import SpreadMeter

PHASES = ("idle", "receive", "schedule", "launch", "wait", "commit", "send")
WITHIN = ("metadata",)  # of schedule: writing the arrays of a step that is decided
OTHERS = ("pause", "gc", "encode", "decode", "queue")


class StepTimers:
    """`pause` meters how long the loop works without waiting for the engine or for messages: nothing else is served
    meanwhile. `gc`, `encode`, `decode` and `queue` are for those who measure them."""

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
        """What was done until now belongs to no phase."""
        self._last = self._awake = time.perf_counter_ns()

    def lap(self, phase: Meter, step: int = -1) -> None:
        """What was done since the last lap belongs to `phase`."""
        now = time.perf_counter_ns()
        phase.add(now - self._last)
        if self.trace is not None:
            self.trace.add(phase.name, self._last, now, step)
        self._last = now

    def rest(self) -> None:
        """The loop is about to wait: the next lap is a wait, and ends with `awake`."""
        self._pause.add(time.perf_counter_ns() - self._awake)

    def awake(self, phase: Meter, step: int = -1) -> None:
        """As `lap`, at the end of a wait."""
        self.lap(phase, step)
        self._awake = self._last

    def close(self) -> None:
        """Write what there is of a trace. Idempotent."""
        if self.trace is not None:
            self.trace.write()

    def scheduled(self, rows: int, tokens: int) -> None:
        """A step was launched."""
        self.num_rows += rows
        self.num_tokens += tokens
        self.last_rows = rows


def _meter(name: str) -> Meter:
    return Meter(name) if name in OTHERS else SpreadMeter(name)


def step_timers(profile_steps: int, say: Callable[[str], None]) -> StepTimers:
    """With a trace of the first `profile_steps` steps, in the current folder; `say` hears of it."""
    if not profile_steps:
        return StepTimers()
    return StepTimers(ChromeTrace(profile_steps, "engine", say))
