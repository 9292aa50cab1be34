"""The parts of an answer, and what takes a growing text apart into them (`rust/minisgl-text/src/answer`).

Invariants: whatever pieces the text comes in, the parts joined are the same; no character of the text is lost but the
markers around reasoning and calls; a call that is no call is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call; `index` counts those of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Text | Reasoning | CallBegun | CallArguments


class MessageParser(Protocol):
    """Takes the text of one answer apart."""

    def push(self, text: str) -> list[Part]:
        """What is decided once `text` has come."""

    def finish(self, cut: bool = False) -> list[Part]:
        """What was held back, at the end of the text. `cut`: a limit ended it, so that the beginning of a call is none,
        and no text either."""

    @property
    def broken(self) -> list[int]:
        """The numbers of the calls whose arguments are no whole object, or not what the model meant: an answer with one
        of them calls no tools."""


class PlainParser:
    """All is content."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self, cut: bool = False) -> list[Part]:
        return []

    @property
    def broken(self) -> list[int]:
        return []
