"""Reads a few fields of a client's object before it is checked, as the bytes that they are.

Nothing is built of a value: 8 MB of brackets would be millions of objects, and whoever builds them holds the
interpreter for a second. So a structure for `decoded` has fields of type `msgspec.Raw` alone.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from minisgl.server.core.surrogates import without_halves

S = TypeVar("S", bound=msgspec.Struct)
NOTHING = msgspec.Raw(b"null")
SHOWN_BYTES = 200
WRONG = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that `decoded` raises: no JSON, no object, nested too deeply."""
_text = msgspec.json.Decoder(str)


def decoded(data: bytes | bytearray | msgspec.Raw, fields: type[S]) -> S:
    """Return the fields that an object has by the names of `fields`, with U+FFFD in the place of half a character.
    Raises `WRONG`."""
    try:
        return msgspec.json.decode(data, type=fields)
    except msgspec.DecodeError:
        given = bytes(data)
        if (mended := without_halves(given)) == given:
            raise
        return msgspec.json.decode(mended, type=fields)


def text_of(raw: msgspec.Raw) -> str | None:
    """Return a text; None for any other value."""
    with contextlib.suppress(*WRONG):
        return _text.decode(raw)
    return None


def begin_of(raw: msgspec.Raw, num_bytes: int) -> bytes:
    return bytes(memoryview(raw)[:num_bytes])


def shown(raw: msgspec.Raw) -> object:
    """Return a value for an error; of a long one the text that it begins with."""
    begin = begin_of(raw, SHOWN_BYTES + 1)
    with contextlib.suppress(*WRONG):
        if len(begin) <= SHOWN_BYTES:
            return msgspec.json.decode(begin)
    return begin[:SHOWN_BYTES].decode(errors="replace")
