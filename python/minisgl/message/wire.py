"""Bytes on the wire: one frame carries a list of messages as msgpack, behind the schema version.

Keeps true: a frame of another version, or one that does not fit the types, is a `MessageError`, never a wrong message.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl.message.types import SCHEMA_VERSION, FromEngine, ToEngine

_VERSION = SCHEMA_VERSION.to_bytes(2, "little")
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


class MessageError(ValueError):
    """A frame that this version cannot read."""


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    return _VERSION + _encoder.encode(messages)


def _body(frame: bytes) -> bytes:
    if frame[:2] != _VERSION:
        got = int.from_bytes(frame[:2], "little")
        raise MessageError(f"schema version {got}, this side speaks {SCHEMA_VERSION}")
    return frame[2:]


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    try:
        return _to_engine.decode(_body(frame))
    except msgspec.MsgspecError as error:
        raise MessageError(str(error)) from error


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    try:
        return _from_engine.decode(_body(frame))
    except msgspec.MsgspecError as error:
        raise MessageError(str(error)) from error
