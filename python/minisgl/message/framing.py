"""Frames on a stream socket: four bytes say how long a frame is, little-endian.

Invariants: a frame comes out whole or not at all; what is kept of a frame that is not here yet is what came of it.
"""

from __future__ import annotations

from minisgl.message.codec import MessageError

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30  # far above any frame: a length beyond it is none


def framed(frame: bytes) -> bytes:
    """With its length in front. Raises `MessageError` if it is too long."""
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(f"a frame of {len(frame)} bytes is too long: the limit is {MAX_FRAME_BYTES}")
    return len(frame).to_bytes(LENGTH_BYTES, "little") + frame


class FrameReader:
    """Takes frames out of what comes from a socket."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # what lies before was taken

    @property
    def is_empty(self) -> bool:
        """Whether all that came was taken."""
        return self._at == len(self._buffer)

    def feed(self, data: bytes | memoryview) -> None:
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """The next frame that is here whole. Raises `MessageError` if none can be as long as it says."""
        begin = self._at + LENGTH_BYTES
        length = int.from_bytes(self._buffer[self._at : begin], "little")
        if len(self._buffer) < begin:
            return None
        if length > MAX_FRAME_BYTES:
            raise MessageError(f"a frame of {length} bytes is too long: the limit is {MAX_FRAME_BYTES}")
        if len(self._buffer) < begin + length:
            return None
        self._at = begin + length
        return bytes(memoryview(self._buffer)[begin : self._at])
