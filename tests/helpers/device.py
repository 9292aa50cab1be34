"""A device of the tests: queues whose jobs run late, in any order that marks allow.

Keeps true: a job runs once, after all before it in its queue and after the marks that its queue was told to go after;
`wait` runs what it must, and a drawn choice of what it may.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

Job = Callable[[], None]


class LateMark:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.passed = False

    def reached(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self._device.run_until(self)

    def seconds_after(self, earlier: LateMark) -> float:
        assert self.passed and earlier.passed
        return 0.0


class LateQueue:
    def __init__(self, device: LateDevice, name: str) -> None:
        self.name = name
        self._device = device
        self.todo: list[tuple[str, Job | LateMark]] = []

    def run(self, name: str, job: Job) -> None:
        self.todo.append((name, job))
        self._device.stir()

    def mark(self) -> LateMark:
        mark = LateMark(self._device)
        self.todo.append(("mark", mark))
        return mark

    def after(self, mark: LateMark) -> None:
        if self._device.heed:
            self.todo.append(("after", mark))

    def step(self) -> bool:
        """Do the next thing; False if there is none, or its mark is not passed."""
        if not self.todo:
            return False
        name, what = self.todo[0]
        if name == "after":
            assert isinstance(what, LateMark)
            if not what.passed:
                return False
        elif isinstance(what, LateMark):
            what.passed = True
        else:
            self._device.log.append(name)
            with torch.inference_mode():  # as where it was queued
                what()
        self.todo.pop(0)
        return True


class LateDevice:
    """`heed` False ignores `after`: what a device does when an order was forgotten."""

    def __init__(self, seed: int, *, eagerness: float = 0.3, heed: bool = True) -> None:
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self.heed = heed
        self.log: list[str] = []
        self.forward, self.copy_in, self.copy_out = (LateQueue(self, n) for n in ("forward", "copy_in", "copy_out"))
        self._queues = [self.forward, self.copy_in, self.copy_out]

    def host_block(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def settle(self) -> None:
        return

    def stir(self) -> None:
        while self._random.random() < self._eagerness:
            self._random.choice(self._queues).step()

    def run_until(self, mark: LateMark) -> None:
        stuck = 0
        while not mark.passed:
            stuck = 0 if self._random.choice(self._queues).step() else stuck + 1
            assert stuck < 1000, "nothing can run: the queues wait for each other"
