"""The thread in which an engine's forwards run, one after the other, in the order of their launches.

Keeps true: `submit` returns at once; whatever a forward raises reaches the one who waits for it, and the thread goes
on.
Doesn't know: what a forward does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from minisgl.engine.api import StepResult

Forward = Callable[[], StepResult]


class PendingStep:
    """A `StepHandle`."""

    __slots__ = ("_done", "_error", "_result")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def run(self, forward: Forward) -> None:
        try:
            self._result = forward()
        except BaseException as error:  # handed over to whoever waits
            self._error = error
        self._done.set()

    def wait(self) -> StepResult:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        return self._done.is_set()


class ForwardThread:
    """`threaded` False runs each forward inside `submit`, for tests that want no concurrency."""

    def __init__(self, name: str, *, threaded: bool = True) -> None:
        self._jobs: queue.SimpleQueue[tuple[PendingStep, Forward] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def submit(self, forward: Forward) -> PendingStep:
        step = PendingStep()
        if self._thread is None:
            step.run(forward)
        else:
            self._jobs.put((step, forward))
        return step

    def close(self) -> None:
        """Finish what was submitted and end the thread. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, forward = job
            step.run(forward)
