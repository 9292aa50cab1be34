"""Lone surrogates in JSON, which clients produce that split texts within a pair: no tokenizer encodes them.

Invariants: whole pairs and escaped backslashes are unchanged; the time is linear in the text's length.
"""

from __future__ import annotations

import re

_HALVES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.|(\xed[\xa0-\xbf][\x80-\xbf])",
    re.DOTALL,
)


def without_halves(data: bytes | bytearray) -> bytes:
    """Return JSON with each lone surrogate, escaped or encoded, replaced by U+FFFD."""
    return _HALVES.sub(lambda found: rb"\ufffd" if found[1] or found[2] else found[0], data)


def arguments_without_halves(arguments: str) -> str:
    """Return the JSON of a call's arguments with each escaped lone surrogate replaced by U+FFFD."""
    if "\\u" not in arguments:
        return arguments  # the common case
    return without_halves(arguments.encode(errors="replace")).decode()
