"""A trace of steps as a JSON file that chrome://tracing, Perfetto and speedscope open.

Keeps true: memory is bounded: it stops after as many steps as it was asked for. Format: Trace Event Format, "complete"
events (ph X) with times in microseconds.
Doesn't know: what the phases mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOP, DEVICE = 1, 2  # thread ids: what the step loop does, what the engine computes meanwhile


class ChromeTrace:
    """Collects until the first `num_steps` steps with rows are done, then writes `path` and says so."""

    def __init__(self, num_steps: int, path: Path, say: Callable[[str], None]) -> None:
        self._left = num_steps
        self._path = path
        self._say = say
        self._events: list[tuple[int, str, int, int, int]] = []

    def add(self, name: str, start_ns: int, end_ns: int, step: int, *, thread: int = LOOP) -> None:
        """Something that took from `start_ns` to `end_ns` of `time.perf_counter_ns`; `step` -1: of no step."""
        if self._left:
            self._events.append((thread, name, start_ns, end_ns, step))

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
            self._path.write_text(json.dumps({"traceEvents": _as_json(events), "displayTimeUnit": "ms"}))
        except OSError as error:
            self._say(f"--profile-steps: {self._path.name} cannot be written: {error.strerror}")
            return
        self._say(f"--profile-steps: wrote {self._path.name}: open it with Perfetto or chrome://tracing")


def _as_json(events: list[tuple[int, str, int, int, int]]) -> list[dict[str, Any]]:
    pid = os.getpid()
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "minisgl engine"}},
        {"ph": "M", "pid": pid, "tid": LOOP, "name": "thread_name", "args": {"name": "step loop"}},
        {"ph": "M", "pid": pid, "tid": DEVICE, "name": "thread_name", "args": {"name": "forward"}},
    ]
    for thread, name, start, end, step in events:
        event = {"ph": "X", "pid": pid, "tid": thread, "name": name, "ts": start / 1e3, "dur": (end - start) / 1e3}
        found.append(event if step < 0 else {**event, "args": {"step": step}})
    return found
