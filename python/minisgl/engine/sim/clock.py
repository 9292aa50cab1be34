"""The time of a simulated device: the machine's, or a virtual one.

Invariants: no clock runs backwards; `sleep_until` never returns early.
"""

from __future__ import annotations

import time
from typing import Protocol

SPIN_S = 150e-6
"""What a sleep may come late (the kernel's timer slack is 50 us, waking a thread takes the rest): awake for so long."""


class Clock(Protocol):
    """Seconds since any fixed moment."""

    def now(self) -> float: ...

    def sleep_until(self, when: float) -> None: ...


class RealClock:
    """`time.perf_counter`. Sleeps until shortly before the moment and waits for the rest awake."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        left = when - time.perf_counter()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.perf_counter() < when:
            pass


class VirtualClock:
    """Moves only when somebody sleeps."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)
