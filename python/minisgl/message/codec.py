"""Encoding of messages: a frame is the schema version followed by a list of messages as msgpack. A stamped frame has
the time of sending between the two, eight bytes of the system-wide monotonic clock, so both processes must run on one
machine. On a stream socket each frame is preceded by its length (four bytes, little-endian).

Invariants: a frame of another version, or one that does not match the types, is a `MessageError`, never a wrong
message. The pixels of an image are once in a frame, however many of its requests have the image. Only whole frames are
returned; an incomplete one uses no more memory than its received bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from minisgl.message import SCHEMA_VERSION, AddRequest, FromEngine, ToEngine
from minisgl.prompt_image import PromptImage

_VERSION = SCHEMA_VERSION.to_bytes(2, "little")
_STAMPED = (SCHEMA_VERSION | 0x8000).to_bytes(2, "little")
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


T = TypeVar("T")


class MessageError(ValueError):
    """Error for a frame that this version cannot read."""


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    return b"".join(encode_parts(messages))


def encode_parts(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> list[bytes]:
    """Encode a frame as parts to be joined. Pixels of images are parts of their own: they are large and not copied."""
    if not _have_images(messages):
        return [_VERSION + _encoder.encode(messages)]
    parts, sent = [_VERSION + _array_header(len(messages))], set[bytes]()
    for message in messages:
        if not (isinstance(message, AddRequest) and message.images):
            parts.append(_encoder.encode(message))
            continue
        parts.append(_encoder.encode(replace(message, images=()))[:-1] + _array_header(len(message.images)))
        for image in message.images:
            pixels = b"" if image.digest in sent else image.pixels
            parts += [_encoder.encode(replace(image, pixels=b""))[:-2] + _bytes_header(len(pixels)), pixels]
            sent.add(image.digest)
    return parts


def _have_images(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bool:
    return any(isinstance(one, AddRequest) and one.images for one in messages)


def _array_header(length: int) -> bytes:
    return bytes([0x90 | length]) if length < 16 else b"\xdc" + length.to_bytes(2, "big")


def _bytes_header(length: int) -> bytes:
    kind, size = (b"\xc4", 1) if length < 1 << 8 else (b"\xc5", 2) if length < 1 << 16 else (b"\xc6", 4)
    return kind + length.to_bytes(size, "big")


def encode_any(messages: Sequence[msgspec.Struct]) -> bytes:
    """Encode messages of other types in the same format."""
    return _VERSION + _encoder.encode(messages)


def stamped(frame: bytes, sent_ns: int) -> bytes:
    """Return a frame of `encode` with the time of sending, in nanoseconds of a clock that both sides share."""
    return b"".join((_STAMPED, sent_ns.to_bytes(8, "little"), frame[2:]))


def sent_ns(frame: bytes) -> int | None:
    """Return the time of sending of a stamped frame in nanoseconds; `None` for other frames."""
    return int.from_bytes(frame[2:10], "little") if frame[:2] == _STAMPED else None


def _body(frame: bytes) -> memoryview:
    if frame[:2] == _STAMPED:
        return memoryview(frame)[10:]
    if frame[:2] != _VERSION:
        got = int.from_bytes(frame[:2], "little") & 0x7FFF
        raise MessageError(f"schema version {got}, this side speaks {SCHEMA_VERSION}")
    return memoryview(frame)[2:]


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(_body(frame))
    except msgspec.MsgspecError as error:
        raise MessageError(str(error)) from error


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    messages = _decoded(_to_engine, frame)
    if not _have_images(messages):
        return messages
    sent = dict[bytes, bytes]()

    def whole(image: PromptImage) -> PromptImage:
        if image.pixels:
            sent[image.digest] = image.pixels
            return image
        if image.digest not in sent:
            raise MessageError("an image has no pixels")
        return replace(image, pixels=sent[image.digest])

    return [
        replace(one, images=tuple(map(whole, one.images))) if isinstance(one, AddRequest) else one for one in messages
    ]


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    return _decoded(_from_engine, frame)


def decode_said(messages: bytes) -> list[FromEngine]:
    """Decode the messages in an `EngineSays`. Raises `MessageError`."""
    return decode_from_engine(_VERSION + messages)


class Codec:
    """Encoder and decoder of frames."""

    def encode(self, messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
        return b"".join(self.encode_parts(messages))

    def encode_parts(self, messages: Sequence[ToEngine] | Sequence[FromEngine]) -> list[bytes]:
        """Encode a frame as parts to be joined (`encode_parts`)."""
        return encode_parts(messages)

    def decode_to_engine(self, frame: bytes) -> list[ToEngine]:
        """Decode a frame of messages to the engine. Raises `MessageError`."""
        return decode_to_engine(frame)

    def decode_from_engine(self, frame: bytes) -> list[FromEngine]:
        return decode_from_engine(frame)


class MeasuredCodec(Codec):
    """Codec with stamped frames that reports nanoseconds of encoding and decoding. `queue` gets the time from the
    sender's socket to the receiver's decoder."""

    def __init__(
        self, encode: Callable[[int], None], decode: Callable[[int], None], queue: Callable[[int], None]
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._queue = queue

    def encode_parts(self, messages: Sequence[ToEngine] | Sequence[FromEngine]) -> list[bytes]:
        began = time.perf_counter_ns()
        first, *rest = encode_parts(messages)
        self._encode(time.perf_counter_ns() - began)
        return [stamped(first, time.monotonic_ns()), *rest]

    def decode_to_engine(self, frame: bytes) -> list[ToEngine]:
        return self._decoded(decode_to_engine, frame)

    def decode_from_engine(self, frame: bytes) -> list[FromEngine]:
        return self._decoded(decode_from_engine, frame)

    def _decoded(self, decode: Callable[[bytes], T], frame: bytes) -> T:
        if (sent := sent_ns(frame)) is not None:
            self._queue(max(0, time.monotonic_ns() - sent))
        began = time.perf_counter_ns()
        messages = decode(frame)
        self._decode(time.perf_counter_ns() - began)
        return messages


LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30  # far above any frame: a larger length is an error


def framed(frame: bytes) -> bytes:
    """Return the frame preceded by its length. Raises `MessageError` if it is too long."""
    return length_of([frame]) + frame


def length_of(parts: Sequence[bytes]) -> bytes:
    """Return the length that precedes a frame of these parts. Raises `MessageError` if it is too long."""
    if (length := sum(map(len, parts))) > MAX_FRAME_BYTES:
        raise MessageError(f"a frame of {length} bytes is too long: the limit is {MAX_FRAME_BYTES}")
    return length.to_bytes(LENGTH_BYTES, "little")


class FrameReader:
    """Splits data from a socket into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # start of the unread data

    @property
    def is_empty(self) -> bool:
        """Whether all received data was returned as frames."""
        return self._at == len(self._buffer)

    def feed(self, data: bytes | memoryview) -> None:
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next complete frame, or `None`. Raises `MessageError` if its length exceeds the limit."""
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
