"""A text that grows, and a parser of it, written as if it were whole: a generator that waits where it needs more.

Where a JSON value, or a list of arguments in Python's way, ends in a text that comes in pieces.

Invariants: what is decided depends on the text alone, not on its pieces; what waits in the buffer is shorter than the
longest marker, so that all work is linear in the text. Each character is looked at once; brackets that do not match end
the search.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from minisgl.parsers.api import CallArguments, CallBegun, Part

_JSON = re.compile(r'["{}\[\]]')
_PYTHON = re.compile(r"[\"'{}\[\]()]")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_AFTER_SCALAR = re.compile(r"[\s,:{}\[\]\"]")
_CLOSES = {"{": "}", "[": "]", "(": ")"}


class ValueScan:
    """Finds the end of one value; the first piece begins with its first character."""

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


T = TypeVar("T")
Waits = Generator[None, None, T]
"""Yields when the text so far decides nothing; returns a T."""

_NO_SPACE = re.compile(r"\S")


class GrowingText(ABC):
    """`_run` of a subclass is the parser; it consumes the text by the methods here and calls `_emit`."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._parts: list[Part] = []
        self._running: Waits[None] | None = None

    @abstractmethod
    def _run(self) -> Waits[None]: ...

    def push(self, text: str) -> list[Part]:
        if text:
            self._buffer = self._buffer[self._at :] + text
            self._at = 0
            self._go_on()
        return self._taken()

    def finish(self) -> list[Part]:
        if not self._ended:
            self._ended = True
            self._go_on()
        return self._taken()

    def _go_on(self) -> None:
        if self._running is None:
            self._running = self._run()
        next(self._running, None)

    def _taken(self) -> list[Part]:
        """Neighbours of a kind become one."""
        found, self._parts = self._parts, []
        return found if len(found) < 2 else [_joined(list(some)) for _, some in itertools.groupby(found, _kind)]

    def _emit(self, part: Part) -> None:
        self._parts.append(part)

    # ------------------------------------------------------------------------------------------------- what comes next

    def _has(self, count: int) -> Waits[bool]:
        """Whether as many characters are there; waits for them."""
        while len(self._buffer) - self._at < count:
            if self._ended:
                return False
            yield
        return True

    def _peek(self) -> Waits[str]:
        """The next character, empty at the end."""
        return self._buffer[self._at] if (yield from self._has(1)) else ""

    def _comes(self, marker: str) -> Waits[bool]:
        """Whether `marker` comes next; no more is waited for than that needs."""
        while True:
            there = self._buffer[self._at : self._at + len(marker)]
            if len(there) == len(marker) or not marker.startswith(there) or self._ended:
                return there == marker
            yield

    def _which(self, markers: Sequence[str]) -> Waits[str | None]:
        """The one of `markers` that comes next, the first of those that could."""
        for marker in markers:
            if (yield from self._comes(marker)):
                return marker
        return None

    # ------------------------------------------------------------------------------------------------------- consuming

    def _take(self, count: int) -> str:
        """What is known to be there."""
        found = self._buffer[self._at : self._at + count]
        self._at += count
        return found

    def _space(self, held: list[str]) -> Waits[None]:
        """Takes white space up to the first other character."""
        while (yield from self._has(1)):
            found = _NO_SPACE.search(self._buffer, self._at)
            held.append(self._take((len(self._buffer) if found is None else found.start()) - self._at))
            if found is not None:
                return

    def _value(self, take: Callable[[str], None], *, python: bool = False) -> Waits[bool]:
        """One value, of which `take` gets the pieces; whether it is whole."""
        scan = ValueScan(python=python)
        while True:
            if not (yield from self._has(1)):
                return False  # a number may end where the text does, but no call does
            end = scan.push(self._buffer, self._at)
            if found := self._take((len(self._buffer) if end is None else end) - self._at):
                take(found)
            if end is not None:
                return not scan.is_broken

    def _until(self, markers: Sequence[str], take: Callable[[str], None]) -> Waits[str | None]:
        """All up to the first of `markers`, which is left; None at the end. Only what may be a marker waits."""
        pattern = re.compile("|".join(map(re.escape, markers))) if markers else None
        firsts = re.compile("[" + re.escape("".join({marker[0] for marker in markers})) + "]") if markers else None
        while True:
            if not (yield from self._has(1)):
                return None
            found = None if pattern is None else pattern.search(self._buffer, self._at)
            end = len(self._buffer) if found is None else found.start()
            if found is None and not self._ended and firsts is not None:
                end = self._maybe(markers, firsts)
            if end > self._at:
                take(self._take(end - self._at))
            if found is not None:
                return found[0]
            if self._at < len(self._buffer):
                yield  # a marker may have begun

    def _maybe(self, markers: Sequence[str], firsts: re.Pattern[str]) -> int:
        """Where the end of the buffer may be the beginning of a marker."""
        buffer = self._buffer
        at = max(self._at, len(buffer) - max(map(len, markers)) + 1)
        while (found := firsts.search(buffer, at)) is not None:
            at = found.start()
            if any(marker.startswith(buffer[at:]) for marker in markers):
                return at
            at += 1
        return len(buffer)


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallArguments | CallBegun) else 0


def _joined(parts: list[Part]) -> Part:
    """One of parts of a kind. Texts are joined once: to add them one by one copies all that came before each."""
    first = parts[0]
    if len(parts) == 1 or isinstance(first, CallBegun):
        return first
    return dataclasses.replace(first, text="".join(one.text for one in parts if not isinstance(one, CallBegun)))
