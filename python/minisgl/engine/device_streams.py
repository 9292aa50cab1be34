"""The order of work on a device: streams that run jobs one after the other, and events to wait for.

The names are those of `torch.cuda`. The CUDA engine orders all its work through these few calls, so that a test can put
a device of its own in their place, one that runs each job as late or as early as the calls allow.

Invariants: `run`, `record_event` and `wait_event` return at once; a job sees everything before it in its stream, and
everything before the events that its stream waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Block the caller until the stream has passed it. Raises what the device failed with."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Device time from `earlier` to this one; both have passed."""


class Stream(Protocol):
    def run(self, name: str, job: Callable[[], None]) -> None:
        """Queue `job`. What it reads on the host must stay as it is until a later event has passed."""

    def record_event(self) -> DeviceEvent: ...

    def wait_event(self, event: DeviceEvent) -> None:
        """What is queued from now on runs after `event`."""


class Device(Protocol):
    forward: Stream
    copy_in: Stream
    copy_out: Stream

    def host_buffer(self, size: int) -> Tensor:
        """[size] int32 zeros on the host, pinned where there is a GPU: copies from and to it need not wait."""

    def synchronize(self) -> None:
        """Wait for everything the device does, outside of these streams too."""


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, name: str, job: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            job()

    def record_event(self) -> _CudaEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return _CudaEvent(event)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice:
    """Three streams. Copies have their own, so that they run beside the forward."""

    def __init__(self, device: torch.device) -> None:
        self.forward_stream = torch.cuda.Stream(device)
        self.forward: Stream = _CudaStream(self.forward_stream)
        self.copy_in: Stream = _CudaStream(torch.cuda.Stream(device))
        self.copy_out: Stream = _CudaStream(torch.cuda.Stream(device))

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.forward_stream.device)


class _InlineEvent:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _InlineEvent)
        return self._time - earlier._time


class _InlineStream:
    def run(self, name: str, job: Callable[[], None]) -> None:
        job()

    def record_event(self) -> _InlineEvent:
        return _InlineEvent()

    def wait_event(self, event: DeviceEvent) -> None:
        return


class InlineDevice:
    """Runs each job when it is queued: the engine's own logic without a device."""

    def __init__(self) -> None:
        self.forward: Stream = _InlineStream()
        self.copy_in: Stream = self.forward
        self.copy_out: Stream = self.forward

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def synchronize(self) -> None:
        return
