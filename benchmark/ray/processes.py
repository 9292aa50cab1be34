"""Who of a server's or a Ray cluster's processes used how much CPU time, by what they are.

Invariants: every process counts once, under one part; what has ended since is not counted.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence

import psutil

INGRESS = "minisgl"
"""The deployment of the ingress (`minisgl.ray.application`); others are of replicas."""
PARTS = ("proxy", "ingress", "replica", "server", "engine", "controller", "ray")
OF_A_REPLICA = ("replica", "server", "engine")


def part_of(command: Sequence[str]) -> str:
    """One of `PARTS`, by a process's command line; `ray` is what Ray has beside them."""
    line = " ".join(command)
    if line.startswith("ray::ServeReplica:"):
        deployment = line.split()[0].split(":")[4].partition(".")[0] if line.count(":") >= 4 else ""
        return "ingress" if deployment == INGRESS else "replica"
    if line.startswith("ray::ProxyActor"):
        return "proxy"
    if line.startswith("ray::ServeController"):
        return "controller"
    if "minisgl.runner.process" in command:
        return "engine"
    return "server" if "minisgl" in command and "serve" in command else "ray"


def below(pid: int, but: Iterable[int] = ()) -> list[psutil.Process]:
    """All that `pid` has started, without `but` and what those have started."""
    left_out = set(but)
    for one in list(left_out):
        with contextlib.suppress(psutil.NoSuchProcess):
            left_out.update(child.pid for child in psutil.Process(one).children(recursive=True))
    return [child for child in psutil.Process(pid).children(recursive=True) if child.pid not in left_out]


def whole(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


class Cpu:
    """CPU seconds by part between two moments. Processes and their parts are found once: a worker's title changes."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._parts: dict[psutil.Process, str] = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._parts[process] = part_of(process.cmdline())
        self._before = self._look()

    def _look(self) -> dict[psutil.Process, float]:
        found = {}
        for process in self._parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process] = float(sum(process.cpu_times()[:2]))
        return found

    def used(self) -> dict[str, float]:
        """Since the beginning."""
        seconds = collections.Counter[str]()
        for process, now in self._look().items():
            seconds[self._parts[process]] += now - self._before.get(process, now)
        return {part: seconds[part] for part in PARTS if part in seconds}


def memory_by_part(processes: Iterable[psutil.Process]) -> dict[str, int]:
    """Bytes; a page that several share counts in each for its part of it (PSS)."""
    found = collections.Counter[str]()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[part_of(process.cmdline())] += int(process.memory_full_info().pss)
    return dict(found)


def why_not(num_replicas: int, of_one: float, rest: float, available: float) -> str | None:
    """Whether so many replicas of `of_one` bytes, beside `rest`, leave a fifth of what is available; else figures."""
    needed = num_replicas * of_one + rest
    if needed <= 0.8 * available:
        return None
    gib = 2.0**30
    return (
        f"{num_replicas} replicas of {of_one / gib:.2f} GiB and {rest / gib:.2f} GiB for the rest of Ray "
        f"are {needed / gib:.1f} GiB of {available / gib:.1f} that are free"
    )


def per_replica(memory: Mapping[str, int], num_replicas: int) -> tuple[float, float]:
    """Bytes of one, and of what is there once."""
    of_replicas = sum(memory.get(part, 0) for part in OF_A_REPLICA)
    return of_replicas / num_replicas, float(sum(memory.values()) - of_replicas)
