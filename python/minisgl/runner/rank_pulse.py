"""Whether the ranks above 0 get on: what each has to do and since when, told by its beats, judged on rank 0.

Keeps true: a rank that says nothing, or does not finish a step, for longer than the limit is found, whatever rank 0's
own forward does; time in which rank 0 itself stood still counts for nobody.
Doesn't know: pipes, processes, what is done about it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from minisgl.message import RankUsage
from minisgl.runner.rank_messages import RankBeat

INTERVAL_S = 0.5  # between two beats
SILENT_S = 3 * INTERVAL_S  # who has said nothing for so long does not merely wait for another rank

Clock = Callable[[], float]


class StepClock:
    """On a rank: the oldest step that it was given and has not finished. Steps begin in one thread and end in another,
    in the same order."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._open: deque[tuple[int, float]] = deque()
        self._last_end = clock()

    def begin(self, step: int) -> None:
        self._open.append((step, self._clock()))

    def end(self) -> None:
        self._last_end = self._clock()
        self._open.popleft()

    def oldest(self) -> tuple[int, float]:
        """(step, seconds since it was its turn), or (-1, 0)."""
        try:
            step, since = self._open[0]
        except IndexError:
            return -1, 0.0
        return step, self._clock() - max(since, self._last_end)


class RankWatch:
    """On rank 0: what ranks 1 .. `num_ranks` said last. Any thread."""

    def __init__(self, num_ranks: int, limit_s: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._last_look = self._began = clock()
        self._heard = dict.fromkeys(range(1, num_ranks + 1), self._began)
        self._beats = dict.fromkeys(self._heard, RankBeat(-1, 0.0, 0.0, 0))

    @property
    def look_every_s(self) -> float:
        return min(INTERVAL_S, self._limit_s / 4)

    def hear(self, rank: int, beat: RankBeat) -> None:
        with self._lock:
            self._heard[rank], self._beats[rank] = self._clock(), beat

    def usage(self) -> list[RankUsage]:
        with self._lock:
            return [RankUsage(rank, beat.cpu_s, beat.resident_bytes) for rank, beat in self._beats.items()]

    def trouble(self) -> str:
        """Who does not get on, and since when; nothing if all do. To be asked every `look_every_s`, once all have
        loaded."""
        with self._lock:
            now = self._clock()
            late, self._last_look = now - self._last_look > SILENT_S, now
            if late:  # this process stood still (or begins): ranks waited for it, what they said is yet to be read
                self._began, self._heard = now, dict.fromkeys(self._heard, now)
            return self._judged(now)

    def _judged(self, now: float) -> str:
        limit = f", the limit is {self._limit_s:g} (--step-timeout)"
        silent = {rank: now - heard for rank, heard in self._heard.items()}
        ran = now - self._began
        ages = {rank: min(beat.age_s + silent[rank], ran) for rank, beat in self._beats.items() if beat.step >= 0}
        slow = [rank for rank, age in ages.items() if age > self._limit_s]
        gone = [rank for rank, seconds in silent.items() if seconds > SILENT_S]
        longest = max(silent.values())
        if gone and (slow or longest > self._limit_s):  # the others may only wait for them
            return f"{_ranks(gone)} said nothing for {longest:.1f} s{limit}"
        if slow:
            return f"{_ranks(slow)} did not finish step {self._beats[slow[0]].step} in {ages[slow[0]]:.1f} s{limit}"
        return ""


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"tensor-parallel rank {names}" if len(ranks) == 1 else f"tensor-parallel ranks {names}"
