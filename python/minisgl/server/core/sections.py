"""Splits one choice's output into sections (reasoning, text, call), for the APIs that show lists of items or blocks.

Invariants: at most one section is open; sections do not depend on how the output was chunked; blank text before,
between and after other sections is dropped, but output of blank text alone is a text section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text


class JoinedText:
    """String that is appended to in pieces and joined on demand. False while empty."""

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
    is_broken: bool = False  # the arguments of a call are not what the model meant
    grown: JoinedText = field(default_factory=JoinedText)

    @property
    def text(self) -> str:
        """The section's text so far; of a call, its arguments as JSON."""
        return str(self.grown)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Parsed arguments of a call; `None` if they are incomplete, no object or broken: the call must not be made.
        Empty while the call has no text."""
        if self.is_broken:
            return None
        try:
            decoded = msgspec.json.decode(self.text or "{}")
        except msgspec.DecodeError:
            return None
        return decoded if isinstance(decoded, dict) else None


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
    """Incremental splitter of one choice's parsed output into sections (reasoning, text, calls)."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._calls: list[Section] = []
        self._open: Section | None = None
        self._blank = JoinedText()  # blank text that may be dropped

    def whole(self) -> list[Section]:
        """Return all sections but calls without valid arguments, which clients must not make."""
        return [one for one in self.all if one.kind != "call" or one.arguments is not None]

    def take(self, parts: list[Part], broken: Sequence[int] = (), *, is_end: bool = False) -> list[Change]:
        """Add parsed output; return the changes. `broken`: indices of broken calls; `is_end`: no output follows."""
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
        """Close the open section at the end of the output; return the changes. Idempotent."""
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
