"""Extracts a few fields of a JSON object as raw bytes, before the body is validated.

No values are built: 8 MB of brackets would become millions of objects, and building them holds the GIL for a second.
Therefore a structure for `decoded` has fields of type `msgspec.Raw` alone.
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
"""Errors that `decoded` raises: no JSON, no object, nested too deeply."""
_text = msgspec.json.Decoder(str)


def decoded(data: bytes | bytearray | msgspec.Raw, fields: type[S]) -> S:
    """Return the raw fields of a JSON object that `fields` names; lone surrogates become U+FFFD. Raises `WRONG`."""
    try:
        return msgspec.json.decode(data, type=fields)
    except msgspec.DecodeError:
        given = bytes(data)
        if (mended := without_halves(given)) == given:
            raise
        return msgspec.json.decode(mended, type=fields)


def text_of(raw: msgspec.Raw) -> str | None:
    """Return the string that `raw` encodes; `None` for any other value."""
    with contextlib.suppress(*WRONG):
        return _text.decode(raw)
    return None


def begin_of(raw: msgspec.Raw, num_bytes: int) -> bytes:
    return bytes(memoryview(raw)[:num_bytes])


def shown(raw: msgspec.Raw) -> object:
    """Return a value to show in an error: decoded if it is short, else its first `SHOWN_BYTES` bytes as text."""
    begin = begin_of(raw, SHOWN_BYTES + 1)
    with contextlib.suppress(*WRONG):
        if len(begin) <= SHOWN_BYTES:
            return msgspec.json.decode(begin)
    return begin[:SHOWN_BYTES].decode(errors="replace")
