"""Messages to bytes and back, as `minisgl.message` does it, with what that costs measured if asked for.

Keeps true: measured or not, both sides understand each other: a measured frame carries the moment at which it was
handed to the socket. That moment is on the system-wide monotonic clock, so both processes must run on one machine.
Doesn't know: sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from minisgl.message import (
    FromEngine,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
    sent_ns,
    stamped,
)
from minisgl.metrics.meters import Meter

T = TypeVar("T")


class Transport:
    """Without meters: the plain functions."""

    def encode(self, messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
        return encode(messages)

    def decode_to_engine(self, frame: bytes) -> list[ToEngine]:
        """Raises `MessageError`, as the next one."""
        return decode_to_engine(frame)

    def decode_from_engine(self, frame: bytes) -> list[FromEngine]:
        return decode_from_engine(frame)


class MeasuredTransport(Transport):
    """`queue` meters the time from the sender's socket to the receiver's decoder: on the way and not yet looked at."""

    def __init__(self, encode: Meter, decode: Meter, queue: Meter) -> None:
        self._encode = encode
        self._decode = decode
        self._queue = queue

    def encode(self, messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
        began = time.perf_counter_ns()
        frame = encode(messages)
        self._encode.add(time.perf_counter_ns() - began)
        return stamped(frame, time.monotonic_ns())

    def decode_to_engine(self, frame: bytes) -> list[ToEngine]:
        return self._decoded(decode_to_engine, frame)

    def decode_from_engine(self, frame: bytes) -> list[FromEngine]:
        return self._decoded(decode_from_engine, frame)

    def _decoded(self, decode: Callable[[bytes], T], frame: bytes) -> T:
        if (sent := sent_ns(frame)) is not None:
            self._queue.add(max(0, time.monotonic_ns() - sent))
        began = time.perf_counter_ns()
        messages = decode(frame)
        self._decode.add(time.perf_counter_ns() - began)
        return messages
