"""How long an event loop keeps others waiting: how late it is for a timer.

Invariants: costs a wake-up every `BUSY_S` while there is work and every `IDLE_S` otherwise; a pause that is longer than
that is seen, shorter by at most as much.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from minisgl.metrics.meters import Meter

BUSY_S = 0.01
IDLE_S = 1.0


class LoopLag:
    """`busy` says whether there is work. `start` on the loop that is measured."""

    def __init__(self, meter: Meter, busy: Callable[[], bool]) -> None:
        self._meter = meter
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    def start(self) -> None:
        interval = BUSY_S if self._busy() else IDLE_S
        self._due_ns = time.perf_counter_ns() + int(interval * 1e9)
        self._timer = asyncio.get_running_loop().call_later(interval, self._tick)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._meter.add(max(0, time.perf_counter_ns() - self._due_ns))
        self.start()
