"""The order of work on a device: queues that run what they are given one after the other, marks to wait for.

The CUDA engine says all its ordering through these few calls, so that a test can put a device of its own in their
place, one that runs each job as late or as early as the calls allow.

Keeps true: `run`, `mark` and `after` return at once; a job sees everything before it in its queue, and everything
before the marks its queue was told to go after.
Doesn't know: steps, buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a queue."""

    def reached(self) -> bool: ...

    def wait(self) -> None:
        """Block the caller until it is reached. Raises what the device failed with."""

    def seconds_after(self, earlier: Mark) -> float:
        """Device time from `earlier` to this one; both are reached."""


class Queue(Protocol):
    def run(self, name: str, job: Callable[[], None]) -> None:
        """Queue `job`. What it reads on the host must stay as it is until a later mark is reached."""

    def mark(self) -> Mark: ...

    def after(self, mark: Mark) -> None:
        """What is queued from now on runs after `mark`."""


class Device(Protocol):
    forward: Queue
    copy_in: Queue
    copy_out: Queue

    def host_block(self, size: int) -> Tensor:
        """[size] int32 zeros on the host, from and to which copies need not wait."""

    def settle(self) -> None:
        """Wait for all that the device does, outside of these queues too: tensors that were made there are filled."""


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_after(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class _CudaQueue:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, name: str, job: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            job()

    def mark(self) -> _CudaMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return _CudaMark(event)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self.stream.wait_event(mark.event)


class CudaDevice:
    """Three streams. Copies have their own, so that they run beside the forward."""

    def __init__(self, device: torch.device) -> None:
        self.forward_stream = torch.cuda.Stream(device)
        self.forward: Queue = _CudaQueue(self.forward_stream)
        self.copy_in: Queue = _CudaQueue(torch.cuda.Stream(device))
        self.copy_out: Queue = _CudaQueue(torch.cuda.Stream(device))

    def host_block(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def settle(self) -> None:
        torch.cuda.synchronize(self.forward_stream.device)


class _Now:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_after(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Now)
        return self._at - earlier._at


class _InlineQueue:
    def run(self, name: str, job: Callable[[], None]) -> None:
        job()

    def mark(self) -> _Now:
        return _Now()

    def after(self, mark: Mark) -> None:
        return


class InlineDevice:
    """Runs each job when it is queued: the engine's own logic without a device."""

    def __init__(self) -> None:
        self.forward: Queue = _InlineQueue()
        self.copy_in: Queue = self.forward
        self.copy_out: Queue = self.forward

    def host_block(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def settle(self) -> None:
        return
