"""Device for tests: streams whose jobs run late, in any order that events allow.

Invariants: a job runs once, after all earlier ones in its stream and after the events that its stream waits for;
`synchronize` runs what it must, and a random choice of other jobs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

Job = Callable[[], None]


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self._device.run_until(self)

    def seconds_since(self, earlier: LateEvent) -> float:
        assert self.passed and earlier.passed
        return 0.0


class LateStream:
    def __init__(self, device: LateDevice, name: str) -> None:
        self.name = name
        self._device = device
        self.todo: list[tuple[str, Job | LateEvent]] = []

    def run(self, name: str, job: Job) -> None:
        self.todo.append((name, job))
        self._device.stir()

    def record_event(self) -> LateEvent:
        event = LateEvent(self._device)
        self.todo.append(("record", event))
        return event

    def wait_event(self, event: LateEvent) -> None:
        if self._device.heed:
            self.todo.append(("wait", event))

    def step(self) -> bool:
        """Run the stream's next job or event; return false if there is none or it waits for an event."""
        if not self.todo:
            return False
        name, what = self.todo[0]
        if name == "wait":
            assert isinstance(what, LateEvent)
            if not what.passed:
                return False
        elif isinstance(what, LateEvent):
            what.passed = True
        else:
            self._device.log.append(name)
            with torch.inference_mode():  # as where it was queued
                what()
        self.todo.pop(0)
        return True


class LateDevice:
    """Device whose streams run late. `heed` false ignores `wait_event`, like a program that forgot to order its
    streams."""

    survives_errors = False

    def __init__(self, seed: int, *, eagerness: float = 0.3, heed: bool = True) -> None:
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self.heed = heed
        self.log: list[str] = []
        self.forward, self.copy_in, self.copy_out = (LateStream(self, n) for n in ("forward", "copy_in", "copy_out"))
        self._streams = [self.forward, self.copy_in, self.copy_out]

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def synchronize(self) -> None:
        return

    def stir(self) -> None:
        while self._random.random() < self._eagerness:
            self._random.choice(self._streams).step()

    def run_until(self, event: LateEvent) -> None:
        stuck = 0
        while not event.passed:
            stuck = 0 if self._random.choice(self._streams).step() else stuck + 1
            assert stuck < 1000, "nothing can run: the streams wait for each other"
