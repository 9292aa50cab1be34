"""Heartbeats and the watchdog that evaluates them. A process reports every half second what its loop does and for how
long; the HTTP process watches the engine process this way, and rank 0 the other ranks.

Invariants: heartbeats continue while a loop waits for a forward or hangs, and stop with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import msgspec

from minisgl.message import Heartbeat


class WatchTimes(msgspec.Struct, frozen=True):
    """Intervals and limits of the watchdog, in seconds. The gateway and the pool get them too."""

    interval_s: float = 0.5  # seconds between two heartbeats
    silent_s: float = 1.5  # silence after which a process no longer counts as waiting for another
    silence_s: float = 3.0  # the longest silence of an engine process
    loop_timeout_s: float = 3.0  # limit between two forwards; it usually takes milliseconds


TIMES = WatchTimes()
Clock = Callable[[], float]
Phase = Literal["idle", "working", "forward"]


class Activity:
    """Current phase of a loop and its start. Written by the loop and read by a thread, as one tuple, so that its parts
    match. Idle until the loop begins: loading may take minutes, and heartbeats from that time may be read later."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._state: tuple[Phase, int, float] = ("idle", -1, clock())

    def enter(self, phase: Phase, step: int = -1) -> None:
        """Enter a phase: the loop is idle, works, or waits for the forward of `step`."""
        self._state = (phase, step, self._clock())

    def heartbeat(self) -> Heartbeat:
        phase, step, since = self._state
        return Heartbeat(phase, self._clock() - since, step)


Sender = AbstractContextManager[Callable[[Heartbeat], None]]


class HeartbeatThread:
    """Thread that sends the result of `heartbeat` at once and every interval. `sender` is entered and left in the
    thread, because a socket belongs to one thread."""

    def __init__(self, heartbeat: Callable[[], Heartbeat], sender: Sender) -> None:
        self._heartbeat = heartbeat
        self._sender = sender
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._sender as send:
            while True:
                send(self._heartbeat())
                if self._stop.wait(TIMES.interval_s):
                    return


class Watchdog:
    """Detects processes that hang or have died, by their last heartbeats. Any thread. `names` formats process ids for
    messages. `silence_s` is the longest allowed silence; `None`: as long as a step may take."""

    def __init__(
        self,
        processes: Sequence[int],
        names: Callable[[Sequence[int]], str],
        silence_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._names = names
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._last_look = float("-inf")
        self._heard = dict.fromkeys(processes, clock())
        self._beats = dict.fromkeys(processes, Heartbeat("idle", 0.0))

    def on_heartbeat(self, process: int, beat: Heartbeat) -> None:
        with self._lock:
            self._heard[process], self._beats[process] = self._clock(), beat

    def beats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each process."""
        with self._lock:
            return dict(self._beats)

    def expect(self) -> None:
        """Count silence from now on, for instance after loading."""
        with self._lock:
            self._heard = dict.fromkeys(self._heard, self._clock())

    def poll(self, step_timeout_s: float) -> str:
        """Return `trouble(step_timeout_s)`; call it every `poll_interval_s`. Time in which this process itself was
        suspended does not count."""
        with self._lock:
            now = self._clock()
            late, self._last_look = now - self._last_look > TIMES.silent_s, now
            if late:  # heartbeats of the meantime are still unread
                self._began, self._heard = now, dict.fromkeys(self._heard, now)
        return self.trouble(step_timeout_s)

    def trouble(self, step_timeout_s: float) -> str:
        """Return which process makes no progress, for how long; empty if none. `step_timeout_s` limits a forward."""
        with self._lock:
            now, beats = self._clock(), self._beats
            silent = {process: now - heard for process, heard in self._heard.items()}
            running = {p: min(b.age_s + silent[p], now - self._began) for p, b in beats.items() if b.phase == "forward"}
            stuck = {p: b.age_s for p, b in beats.items() if b.phase == "working" and b.age_s > TIMES.loop_timeout_s}
        limit = f", the limit is {step_timeout_s:g} (--step-timeout)"
        slow = [process for process, age_s in running.items() if age_s > step_timeout_s]
        gone = [process for process, seconds in silent.items() if seconds > TIMES.silent_s]
        longest = max(silent.values())
        # slow ranks may be waiting for a silent one, which is then the cause
        if gone and (slow or longest > (step_timeout_s if self._silence_s is None else self._silence_s)):
            suffix = limit if self._silence_s is None else ""
            return f"no heartbeat from {self._names(gone)} for {longest:.1f} s{suffix}"
        if slow:
            step, age_s = beats[slow[0]].step, running[slow[0]]
            return f"{self._names(slow)} did not finish step {step} in {age_s:.1f} s{limit}"
        if stuck:
            return f"the step loop of {self._names(list(stuck))} has not moved for {max(stuck.values()):.1f} s"
        return ""


def poll_interval_s(step_timeout_s: float) -> float:
    return min(TIMES.interval_s, step_timeout_s / 4)
