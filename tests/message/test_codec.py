"""Measured frames: both sides read them, and the time on the way is known."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import AbortRequest, AddRequest, Heartbeat
from minisgl.message.codec import (
    MAX_FRAME_BYTES,
    Codec,
    FrameReader,
    MeasuredCodec,
    MessageError,
    decode_from_engine,
    decode_to_engine,
    encode,
    encode_parts,
    framed,
    sent_ns,
    stamped,
)
from minisgl.metrics.meters import Meter, Meters
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SamplingParams


def test_measured_frames_are_read_by_both_sides() -> None:
    found = Meters(("encode", "decode", "queue"))
    measured = MeasuredCodec(*(found[name].add for name in ("encode", "decode", "queue")))
    for sender in (Codec(), measured):
        for receiver in (Codec(), measured):
            assert receiver.decode_from_engine(sender.encode([Heartbeat("idle", 1.0)])) == [Heartbeat("idle", 1.0)]
            assert receiver.decode_to_engine(sender.encode([AbortRequest(3)])) == [AbortRequest(3)]
    counts = [found[name].count for name in ("encode", "decode", "queue")]
    assert counts == [4, 4, 2]  # only a stamped frame says how long it was on the way
    assert found["queue"].total_ns > 0


def test_the_time_on_the_way_is_measured() -> None:
    queue = Meter("queue")
    codec = MeasuredCodec(Meter("encode").add, Meter("decode").add, queue.add)
    frame = Codec().encode([Heartbeat("idle", 1.0)])
    codec.decode_from_engine(stamped(frame, time.monotonic_ns() - 3_000_000_000))
    assert 3 < queue.reading().total_s < 60
    assert sent_ns(frame) is None and sent_ns(stamped(frame, 77)) == 77


def test_a_stamped_frame_of_another_version_is_refused() -> None:
    frame = stamped(Codec().encode([]), 5)
    with pytest.raises(MessageError):
        decode_from_engine(bytes([frame[0] ^ 1]) + frame[1:])


def test_pixels_repeated_in_a_frame_are_sent_once() -> None:
    pixels = bytes(3_000_000)
    image = PromptImage(bytes(32), 1, 1024, (64, 64), pixels)
    later = PromptImage(bytes(32), 2000, 1024, (64, 64), pixels)
    choices = [AddRequest(i, b"", SamplingParams(seed=i), images=(image, later)) for i in range(128)]
    frame = encode(choices)
    assert len(pixels) < len(frame) < len(pixels) + 50_000
    found = decode_to_engine(frame)
    assert found == choices
    held = {id(one.pixels) for request in found if isinstance(request, AddRequest) for one in request.images}
    assert len(held) == 1, "the receiver keeps one copy"


def test_parts_of_a_frame_are_its_bytes_and_the_pixels_themselves() -> None:
    images = tuple(PromptImage(bytes([n]) * 32, n, n, (n, 1), bytes([n]) * 300 * n) for n in range(1, 18))
    messages = [AbortRequest(1), *(AddRequest(i, b"ab", SamplingParams(), images=images[i:]) for i in range(17))]
    parts = encode_parts(messages)
    assert all(any(part is image.pixels for part in parts) for image in images)
    bare = [AddRequest(1, b"", SamplingParams(), images=images)]
    plain = msgspec.msgpack.encode(bare)
    assert encode(bare)[2:] == plain, "as msgspec writes it"
    assert decode_to_engine(b"".join(parts)) == messages


def test_an_image_without_pixels_is_refused() -> None:
    bare = PromptImage(bytes(32), 1, 1024, (64, 64), b"")
    with pytest.raises(MessageError, match="an image has no pixels"):
        decode_to_engine(encode([AddRequest(3, b"", SamplingParams(), images=(bare,))]))


def taken(reader: FrameReader) -> list[bytes]:
    found = []
    while (frame := reader.next()) is not None:
        found.append(frame)
    return found


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 200), min_size=1))
def test_frames_come_out_as_they_went_in(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, frames))
    reader, found, at, turn = FrameReader(), [], 0, 0
    while at < len(data):
        length = cuts[turn % len(cuts)]
        reader.feed(data[at : at + length])
        found += taken(reader)
        at, turn = at + length, turn + 1
    assert found == frames


def test_a_frame_stays_until_it_is_read() -> None:
    reader = FrameReader()
    reader.feed(framed(b"a") + framed(b"b"))
    assert reader.next() == b"a"
    reader.feed(framed(b"c"))
    assert taken(reader) == [b"b", b"c"]


def test_a_length_beyond_all_is_refused_before_anything_comes() -> None:
    reader = FrameReader()
    reader.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(MessageError, match="too long"):
        reader.next()
