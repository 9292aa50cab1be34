"""An answer's parts as sections, for the APIs that show lists of items or blocks.

Invariants: one section is open at a time; whatever pieces the parts come in, the sections are the same; blank text
before, between and after other sections is none, but an answer of nothing else is a section of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text


class JoinedText:
    """False while it is empty."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Section:
    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    is_broken: bool = False  # a call's arguments are not what the model meant
    grown: JoinedText = field(default_factory=JoinedText)

    @property
    def text(self) -> str:
        """As far as it has come; of a call, its arguments."""
        return str(self.grown)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments of a call; None where they are no whole object, or not what the model meant: nobody may call
        with them. Of a call that has just begun they are empty."""
        if self.is_broken:
            return None
        try:
            found = msgspec.json.decode(self.text or "{}")
        except msgspec.DecodeError:
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class Opened:
    section: Section


@dataclass(frozen=True, slots=True)
class Grown:
    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    section: Section


Change = Opened | Grown | Closed


class Sections:
    """Turns the parts of one answer into sections."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._calls: list[Section] = []
        self._open: Section | None = None
        self._blank = JoinedText()  # text that may turn out to be none

    def whole(self) -> list[Section]:
        """Return all but the calls whose arguments are none: nobody may call with them."""
        return [one for one in self.all if one.kind != "call" or one.arguments is not None]

    def take(self, parts: list[Part], broken: Sequence[int] = (), *, is_end: bool = False) -> list[Change]:
        """`broken`: the numbers of the calls that are, see `MessageParser`; `is_end`: no more come."""
        changes: list[Change] = []
        for part in parts:
            match part:
                case Text(text):
                    self._text(text, changes)
                case Reasoning(text):
                    self._grow("reasoning", text, changes)
                case CallBegun(_, call_id, name):
                    self._calls.append(section := Section(len(self.all), "call", call_id, name))
                    self._begin(section, changes)
                case CallArguments(_, text):
                    self._grow("call", text, changes)
        for number in broken:
            self._calls[number].is_broken = True
        return changes + self.finish() if is_end else changes

    def finish(self) -> list[Change]:
        """At the end of the answer. Idempotent."""
        changes: list[Change] = []
        if self._blank and not self.all:
            self._grow("text", str(self._blank), changes)
        self._close(changes)
        return changes

    def _text(self, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != "text":
            self._blank.add(text)
            if not text.strip():
                return
            text = str(self._blank)  # `_begin` drops it
        self._grow("text", text, changes)

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Section(len(self.all), kind), changes)
        section = self._open
        assert section is not None
        section.grown.add(text)
        changes.append(Grown(section, text))

    def _begin(self, section: Section, changes: list[Change]) -> None:
        self._close(changes)
        self._blank = JoinedText()
        self.all.append(section)
        self._open = section
        changes.append(Opened(section))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Closed(self._open))
            self._open = None
