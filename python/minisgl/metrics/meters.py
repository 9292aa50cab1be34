"""How often something happened, how long it took altogether, and at most.

Invariants: counting costs well under a microsecond and allocates nothing that stays; a meter belongs to one thread.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from minisgl.message import MeterReading

WINDOW_NS = 10_000_000_000
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Meter:
    """Durations in nanoseconds, as `time.perf_counter_ns` counts them."""

    __slots__ = ("_before_ns", "_longest_ns", "_window_ns", "count", "name", "total_ns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.total_ns = 0
        self._window_ns = 0  # the longest in this window, in the one before, before that
        self._before_ns = 0
        self._longest_ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        """`count` things took `ns` together; it is `ns` that may be the longest."""
        self.count += count
        self.total_ns += ns
        self._window_ns = max(self._window_ns, ns)

    def reset(self) -> None:
        self.count = self.total_ns = self._longest_ns = self._before_ns = self._window_ns = 0

    def next_window(self) -> None:
        self._longest_ns = max(self._longest_ns, self._window_ns)
        self._before_ns, self._window_ns = self._window_ns, 0

    def reading(self) -> MeterReading:
        recent = max(self._window_ns, self._before_ns)
        return MeterReading(self.count, self.total_ns / 1e9, max(self._longest_ns, recent) / 1e9, recent / 1e9)


class Meters:
    """Meters by name, which are read together."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Meter] = Meter) -> None:
        self._meters = {name: make(name) for name in names}
        self._window_began = time.perf_counter_ns()

    def __getitem__(self, name: str) -> Meter:
        return self._meters[name]

    def reset(self) -> None:
        """Count from now on."""
        self._window_began = time.perf_counter_ns()
        for meter in self._meters.values():
            meter.reset()

    def readings(self) -> dict[str, MeterReading]:
        """`recent` covers at least the last `WINDOW_NS`, less if they are read more seldom than that."""
        now = time.perf_counter_ns()
        found = {name: meter.reading() for name, meter in self._meters.items()}
        if now - self._window_began >= WINDOW_NS:
            self._window_began = now
            for meter in self._meters.values():
                meter.next_window()
        return found


class Peak:
    """The most that something has been, of which `now` tells how much there is: since the start, and in the last 10 to
    20 seconds. `see` wherever there may be more."""

    __slots__ = ("_before", "_most", "_now", "_window", "_window_began")

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._window = self._before = self._most = 0
        self._window_began = time.perf_counter_ns()

    def see(self) -> None:
        self._window = max(self._window, self._now())

    def read(self) -> dict[str, int]:
        now = self._now()
        self._window = max(self._window, now)
        recent = max(self._window, self._before)
        self._most = max(self._most, recent)
        began = time.perf_counter_ns()
        if began - self._window_began >= WINDOW_NS:
            self._window_began = began
            self._before, self._window = self._window, now
        return {"now": now, "recent": recent, "most": self._most}


class GcWatch:
    """Measures the collections of this process's garbage collector from `start` to `stop`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._began = 0

    def start(self) -> None:
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Idempotent."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        else:
            self._meter.add(time.perf_counter_ns() - self._began)


def cpu_seconds() -> float:
    """Of this process, all threads, user and system."""
    return time.process_time()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:  # no Linux
        import psutil

        return int(psutil.Process().memory_info().rss)
