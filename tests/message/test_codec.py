"""Measured frames: both sides read them, and the time on the way is known."""

from __future__ import annotations

import time

import pytest

from minisgl.message import (
    AbortRequest,
    Codec,
    Heartbeat,
    MeasuredCodec,
    MessageError,
    decode_from_engine,
    sent_ns,
    stamped,
)
from minisgl.metrics.meters import Meter, Meters


def test_measured_frames_are_read_by_both_sides() -> None:
    found = Meters(("encode", "decode", "queue"))
    measured = MeasuredCodec(*(found[name] for name in ("encode", "decode", "queue")))
    for sender in (Codec(), measured):
        for receiver in (Codec(), measured):
            assert receiver.decode_from_engine(sender.encode([Heartbeat("idle", 1.0)])) == [Heartbeat("idle", 1.0)]
            assert receiver.decode_to_engine(sender.encode([AbortRequest(3)])) == [AbortRequest(3)]
    counts = [found[name].count for name in ("encode", "decode", "queue")]
    assert counts == [4, 4, 2]  # only a stamped frame says how long it was on the way
    assert found["queue"].total_ns > 0


def test_the_time_on_the_way_is_measured() -> None:
    queue = Meter("queue")
    codec = MeasuredCodec(Meter("encode"), Meter("decode"), queue)
    frame = Codec().encode([Heartbeat("idle", 1.0)])
    codec.decode_from_engine(stamped(frame, time.monotonic_ns() - 3_000_000_000))
    assert 3 < queue.reading().total_s < 60
    assert sent_ns(frame) is None and sent_ns(stamped(frame, 77)) == 77


def test_a_stamped_frame_of_another_version_is_refused() -> None:
    frame = stamped(Codec().encode([]), 5)
    with pytest.raises(MessageError):
        decode_from_engine(bytes([frame[0] ^ 1]) + frame[1:])
