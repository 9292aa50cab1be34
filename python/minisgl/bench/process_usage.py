"""A meter of the CPU seconds and memory of a process and its descendants during a `with`.

    with Usage(pid) as used:
        ...
    used.cpu_s, used.rss_bytes

Memory is the sum of the processes' resident bytes (shared pages count twice), the maximum of samples every `SAMPLE_S`.
Processes that begin and end between two samples are missed.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

import psutil

SAMPLE_S = 0.2


class Usage:
    """A meter of the process `pid` and its descendants. For None, a remote process, both figures stay None."""

    def __init__(self, pid: int | None) -> None:
        self.cpu_s: float | None = None
        self.rss_bytes: int | None = None
        self._pid = pid
        self._before: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, daemon=True)

    def __enter__(self) -> Usage:
        if self._pid is not None:
            self._before = self._sample()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pid is not None:
            self._ended.set()
            self._thread.join()
            after = self._sample()
            self.cpu_s = sum(seconds - self._before.get(pid, 0.0) for pid, seconds in after.items())

    def _sample_on(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> dict[int, float]:
        """Return each process's CPU seconds since its start, and record the memory."""
        cpu_s, rss_bytes = dict[int, float](), 0
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._pid)
            for process in (first, *first.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    cpu_s[process.pid] = float(sum(process.cpu_times()[:2]))
                    rss_bytes += int(process.memory_info().rss)
        self.rss_bytes = max(self.rss_bytes or 0, rss_bytes)
        return cpu_s
