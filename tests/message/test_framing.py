"""Frames come out as they went in, however they are cut on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.message import MAX_FRAME_BYTES, FrameReader, MessageError, framed


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


def test_what_is_not_taken_stays() -> None:
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
