"""Cost of a test run: seconds by folder and by file at its end, a progress line every few seconds, the files that take
longest first, and the factor for timeouts on this machine.

Invariants: no test passes or fails by these measurements; a test's timeout detects hangs only.
"""

from __future__ import annotations

import json
import math
import os
import resource
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.helpers.forking import forked_cpu_s

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "seconds.json"  # CPU seconds by file; `--record-seconds` writes it
EVERY_S = 5.0
SHOWN = 20
_PATIENCE = "TEST_PATIENCE"  # measured once: the other processes of a run find it here
_QUICK_S = 0.05  # seconds of `_work` on a quick, quiet core


def _work() -> None:
    values = {str(i): i for i in range(1000)}
    for _ in range(700):
        sum(values[str(i)] for i in range(1000))


def _measured() -> float:
    begin = time.monotonic()
    _work()
    return min(max(1.0, (time.monotonic() - begin) / _QUICK_S), 20.0)


def patience() -> float:
    """Return the factor by which timeouts are longer than on a quick, quiet machine."""
    if _PATIENCE not in os.environ:
        os.environ[_PATIENCE] = f"{_measured():.2f}"
    return float(os.environ[_PATIENCE])


def patiently(limit_s: float) -> float:
    """Return the timeout for this machine."""
    return limit_s * patience()


def computes_within(used_s: float, limit_s: float) -> bool:
    """Return true if `used_s` of this core's time is less than `limit_s` of a quick core's; measures this core if
    needed."""
    if used_s < limit_s:
        return True
    begin = time.thread_time()
    _work()
    return used_s < limit_s * (time.thread_time() - begin) / _QUICK_S


WAIT_S = patiently(60.0)
"""Timeout of an awaited event in seconds: expiry is a failure, not a measurement."""


def recorded() -> dict[str, float]:
    seconds: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return seconds


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(nodeids: list[str], seconds: dict[str, float]) -> list[int]:
    """Return the order of the tests by whole files: longest first, otherwise unchanged. Unrecorded files come before
    them: one that proves long must not run alone at the end."""
    return sorted(range(len(nodeids)), key=lambda at: -seconds.get(file_of(nodeids[at]), math.inf))


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all its reaped children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used) + forked_cpu_s()


class Meter:
    """Meter of a test process: sets each report's `cpu_s` to the CPU seconds since the previous report."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._before = cpu_s()

    def stamp(self, report: Any) -> None:
        now = cpu_s()
        report.cpu_s, self._before = now - self._before, now


class Tally:
    """Totals in the reporting process: the seconds of each file, and the progress of the run."""

    def __init__(self) -> None:
        self.cpu = Counter[str]()
        self.wall = Counter[str]()
        self.num_tests = 0
        self.at = ""
        self._begin = time.monotonic()
        self._ended = threading.Event()

    def add(self, report: Any) -> None:
        file = file_of(report.nodeid)
        self.cpu[file] += getattr(report, "cpu_s", 0.0)
        self.wall[file] += report.duration
        self.num_tests += report.when == "teardown"
        self.at = file

    def show_progress(self, write_line: Any) -> None:
        """Write a line every `EVERY_S` until `stop`, from a thread, because a test may take longer."""

        def run() -> None:
            while not self._ended.wait(EVERY_S):
                write_line(f"{time.monotonic() - self._begin:6.0f} s {self.num_tests:6} tests  {self.at}")

        threading.Thread(target=run, daemon=True, name="progress").start()

    def stop(self) -> None:
        self._ended.set()

    def lines(self) -> list[str]:
        folders, found = defaultdict(Counter[str]), list[str]()
        for file in self.wall:
            folder = "/".join(file.split("/")[:2]) if file.count("/") > 1 else "tests"
            folders[folder].update({"cpu": self.cpu[file], "wall": self.wall[file]})
        rows = [(name, one["cpu"], one["wall"]) for name, one in folders.items()]
        files = sorted(((name, self.cpu[name], self.wall[name]) for name in self.wall), key=lambda row: -row[1])
        for name, cpu, wall in [*sorted(rows, key=lambda row: -row[1]), *files[:SHOWN]]:
            found.append(f"{cpu:8.1f} s of CPU {wall:8.1f} s  {name}")
        total = sum(self.cpu.values()), sum(self.wall.values())
        return [*found, f"{total[0]:8.1f} s of CPU {total[1]:8.1f} s  all of {self.num_tests} tests"]

    def record(self) -> None:
        """Update `RECORD` with this run's files; other files' seconds are kept."""
        times = recorded() | {file: round(seconds, 1) for file, seconds in self.cpu.items()}
        times = {file: seconds for file, seconds in sorted(times.items()) if (ROOT / file).exists()}
        RECORD.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
