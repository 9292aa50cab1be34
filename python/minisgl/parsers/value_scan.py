"""Where a JSON value, or a list of arguments in Python's way, ends in a text that comes in pieces.

Invariants: each character is looked at once; brackets that do not match end the search.
"""

from __future__ import annotations

import re

_JSON = re.compile(r'["{}\[\]]')
_PYTHON = re.compile(r"[\"'{}\[\]()]")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_AFTER_SCALAR = re.compile(r"[\s,:{}\[\]\"]")
_CLOSES = {"{": "}", "[": "]", "(": ")"}


class ValueScan:
    """Of one value; the first piece begins with its first character."""

    def __init__(self, *, python: bool = False) -> None:
        self._outside = _PYTHON if python else _JSON
        self._closers: list[str] = []
        self._quote = ""  # of the string that it is in
        self._escaped = False
        self._is_scalar: bool | None = None  # a number or a word; not known before the first character
        self.is_broken = False

    def push(self, text: str, at: int) -> int | None:
        """Where in `text`, of which what is before `at` was seen, the value ends or turns out to be broken; None if it
        goes on."""
        if self._is_scalar is None:
            self._is_scalar = text[at] not in '{["('
        if self._is_scalar:
            found = _AFTER_SCALAR.search(text, at)
            return None if found is None else found.start()
        while at < len(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                    at += 1
                    continue
                found = _IN_STRING[self._quote].search(text, at)
                if found is None:
                    return None
                at = found.end()
                if found[0] == "\\":
                    self._escaped = True
                    continue
                self._quote = ""
            else:
                found = self._outside.search(text, at)
                if found is None:
                    return None
                at = found.end()
                if found[0] in _IN_STRING:
                    self._quote = found[0]
                    continue
                if found[0] in _CLOSES:
                    self._closers.append(_CLOSES[found[0]])
                    continue
                if self._closers.pop() != found[0]:
                    self.is_broken = True
                    return at - 1
            if not self._closers:
                return at
        return None
