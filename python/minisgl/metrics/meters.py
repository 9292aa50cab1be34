"""Meters: how often something happened, how long it took in total and at most; spreads of durations, in buckets an
eighth of an octave wide, so that a percentile is right within 7 %; and the lag of an event loop's timer, which is how
long the loop blocks.

Invariants: a meter counts in well under a microsecond, allocates nothing that stays, and belongs to one thread. A
spread stores and sends only buckets that are not empty. Measuring the lag costs a wake-up every `BUSY_S` while there is
work and every `IDLE_S` otherwise, and catches every longer pause.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl.message import MeterReading

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily


WINDOW_NS = 10_000_000_000
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Meter:
    """A meter of durations in nanoseconds, as `time.perf_counter_ns` counts them."""

    __slots__ = ("_before_ns", "_longest_ns", "_window_ns", "count", "name", "total_ns")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.total_ns = 0
        self._window_ns = 0  # longest in this window, then in the last one, then before
        self._before_ns = 0
        self._longest_ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count `count` events that took `ns` together; `ns` as a whole competes for the longest."""
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
    """A set of meters by name that are read together."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Meter] = Meter) -> None:
        self._meters = {name: make(name) for name in names}
        self._window_began = time.perf_counter_ns()

    def __getitem__(self, name: str) -> Meter:
        return self._meters[name]

    def reset(self) -> None:
        """Reset all meters to zero."""
        self._window_began = time.perf_counter_ns()
        for meter in self._meters.values():
            meter.reset()

    def readings(self) -> dict[str, MeterReading]:
        """Read all meters. `recent_s` is the longest since the last reading or in the last `WINDOW_NS`."""
        now = time.perf_counter_ns()
        current = {name: meter.reading() for name, meter in self._meters.items()}
        if now - self._window_began >= WINDOW_NS:
            self._window_began = now
            for meter in self._meters.values():
                meter.next_window()
        return current


class Peak:
    """The maximum of a value, since the start and in the last 10 to 20 seconds. `now` returns the current value; call
    `see` wherever it may have grown."""

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
    """A meter of this process's garbage collections, from `start` to `stop`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._began = 0

    def start(self) -> None:
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Stop measuring garbage collections. Idempotent."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        else:
            self._meter.add(time.perf_counter_ns() - self._began)


def cpu_seconds() -> float:
    """Return the CPU time of this process in seconds: all threads, user and system."""
    return time.process_time()


def resident_bytes() -> int:
    """Return the bytes of this process that are in RAM."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:  # not on Linux
        import psutil

        return int(psutil.Process().memory_info().rss)


PERCENTILES = (50, 90, 95, 99)
FIRST_BOUND, LAST_BOUND = 10, 33  # exported bounds, powers of two in ns: 1 us to 8.6 s


class SpreadMeter(Meter):
    """A meter of durations that also has percentiles."""

    __slots__ = ("_counts",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._counts: dict[int, int] = {}

    def add(self, ns: int, count: int = 1) -> None:
        super().add(ns, count)
        index = bucket(ns)
        self._counts[index] = self._counts.get(index, 0) + count

    def reset(self) -> None:
        super().reset()
        self._counts.clear()

    def reading(self) -> MeterReading:
        plain = super().reading()
        return MeterReading(plain.count, plain.total_s, plain.longest_s, plain.recent_s, dict(self._counts))


def bucket(ns: int) -> int:
    """Return the bucket of a duration: single nanoseconds up to 16, then eight buckets per doubling."""
    shift = max(0, ns.bit_length() - 4)
    return (shift << 3) + (ns >> shift)


def lower_ns(index: int) -> int:
    """Return the least duration of a bucket in nanoseconds; the bucket ends where the next one begins."""
    return index if index < 16 else ((index & 7) + 8) << ((index >> 3) - 1)


def percentiles(spread: Mapping[int, int], longest_s: float, shares: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """Return percentiles in seconds by names such as `p95_s`: the middle of a bucket. Empty without durations."""
    values, seen, total = dict[str, float](), 0, sum(spread.values())
    left = list(shares)
    for index in sorted(spread):
        seen += spread[index]
        while left and 100 * seen >= left[0] * total:
            middle = (lower_ns(index) + lower_ns(index + 1)) / 2e9
            values[f"p{left.pop(0)}_s"] = min(middle, longest_s)
    return values


def histogram(name: str, text: str, reading: MeterReading | None) -> Iterable[HistogramMetricFamily]:
    """Yield a meter's family, without samples for None; bounds are powers of two, where buckets end exactly."""
    from prometheus_client.core import HistogramMetricFamily  # not needed in the engine process

    family = HistogramMetricFamily(name, text)
    if reading is not None:
        total, buckets, counts = 0, [], sorted(reading.spread.items(), reverse=True)
        for power in range(FIRST_BOUND, LAST_BOUND + 1):
            while counts and lower_ns(counts[-1][0]) < 1 << power:
                total += counts.pop()[1]
            buckets.append((repr((1 << power) / 1e9), float(total)))
        family.add_metric((), [*buckets, ("+Inf", float(reading.count))], reading.total_s)
    yield family


BUSY_S = 0.01
IDLE_S = 1.0


class LoopLag:
    """A meter of an event loop's lag. `busy()`: there is work; `beat` is called every `IDLE_S` or more often."""

    def __init__(self, meter: Meter, busy: Callable[[], bool], beat: Callable[[], None] = lambda: None) -> None:
        self._meter = meter
        self._busy = busy
        self._beat = beat
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    def start(self) -> None:
        self._beat()
        interval = BUSY_S if self._busy() else IDLE_S
        self._due_ns = time.perf_counter_ns() + int(interval * 1e9)
        self._timer = asyncio.get_running_loop().call_later(interval, self._tick)

    def stop(self) -> None:
        """Stop measuring the event loop. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._meter.add(max(0, time.perf_counter_ns() - self._due_ns))
        self.start()
