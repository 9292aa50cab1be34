"""Progress of loading: lines of text, and the state of a long step. Bars on a terminal, plain lines elsewhere.

Invariants: off a terminal only whole lines are written; a long step is reported at its beginning and every few seconds;
one writer draws, so that bars and lines do not mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")
BAR_INTERVAL_S = 0.1
LINE_INTERVAL_S = 10.0
MANY = 1_000_000  # a step with more parts than this counts bytes


class Report(Protocol):
    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        """Report a line of text. With `total`, report that `done` of `total` parts of the step `text` are done."""


def track(report: Report, text: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items and report how many are done, at most every `BAR_INTERVAL_S`."""
    report(text, 0, total)
    last = time.monotonic()
    for i, item in enumerate(items):
        yield item
        now = time.monotonic()
        if now - last >= BAR_INTERVAL_S:
            last = now
            report(text, i + 1, total)
    report(text, total, total)


def counter(report: Report, text: str) -> Callable[[int, int], None]:
    """Return a function that reports a count (done, total) under `text`, at most every `BAR_INTERVAL_S`. It may be
    called from several threads: a count lower than an earlier one is dropped."""
    last, most = 0.0, -1

    def progress(done: int, total: int) -> None:
        nonlocal last, most
        if done <= most:
            return
        most = done
        if done in (0, 1, total) or time.monotonic() - last >= BAR_INTERVAL_S:
            last = time.monotonic()
            report(text, done, total)

    return progress


def to_all(*reports: Report) -> Report:
    def report_to_all(text: str, done: int = 0, total: int = 0) -> None:
        for report in reports:
            report(text, done, total)

    return report_to_all


class Display:
    """A report that shows lines through `line`, and steps as bars on `terminal`, or as lines if that is None."""

    def __init__(
        self,
        line: Callable[[str], None],
        terminal: TextIO | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line = line
        self._terminal = terminal
        self._clock = clock
        self._bar: tqdm[NoReturn] | None = None
        self._step: str | None = None
        self._said_at = 0.0

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        if total == 0:
            self.close()
            self._line(text)
        elif self._terminal is not None:
            self._draw(text, done, total)
        else:
            self._log_step(text, done, total)

    def close(self) -> None:
        """End the current progress step and remove its bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = self._step = None

    def _draw(self, text: str, done: int, total: int) -> None:
        if text != self._step:
            self.close()
            self._step = text
            from tqdm import tqdm

            bytes_are_meant = total >= MANY
            self._bar = tqdm(
                total=total,
                desc=text,
                leave=False,
                file=self._terminal,
                dynamic_ncols=True,
                unit_scale=bytes_are_meant,
                unit="B" if bytes_are_meant else "it",
            )
        if self._bar is not None:
            self._bar.n = done
            self._bar.refresh()
        if done >= total:
            self.close()

    def _log_step(self, text: str, done: int, total: int) -> None:
        if text != self._step:
            self._step, self._said_at = text, self._clock()
            self._line(text)
        elif done < total and self._clock() - self._said_at >= LINE_INTERVAL_S:
            self._said_at = self._clock()
            self._line(f"{text}: {100 * done // total} %")
        if done >= total:
            self._step = None
