"""Halves of surrogate pairs in JSON, which clients make that cut texts between them: no tokenizer encodes them.

Invariants: whole pairs and escaped backslashes stay as they are; a text of a megabyte is read once.
"""

from __future__ import annotations

import re

_HALVES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.|(\xed[\xa0-\xbf][\x80-\xbf])",
    re.DOTALL,
)


def without_halves(data: bytes | bytearray) -> bytes:
    """Return JSON with U+FFFD in the place of each half, escaped or encoded."""
    return _HALVES.sub(lambda found: rb"\ufffd" if found[1] or found[2] else found[0], data)


def arguments_without_halves(arguments: str) -> str:
    """Return the JSON text of a call's arguments so."""
    if "\\u" not in arguments:
        return arguments  # nearly always
    return without_halves(arguments.encode(errors="replace")).decode()
