"""Parts of a model's output, and the interface of the streaming parser (`rust/minisgl-text/src/answer`).

Invariants: the joined parts do not depend on how the text is split; no character is lost except the markers around
reasoning and calls; an invalid call is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Further content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Further reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Start of a tool call; `index` counts the calls of the output from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further JSON text of a call's arguments."""

    index: int
    text: str


Part = Text | Reasoning | CallBegun | CallArguments


class MessageParser(Protocol):
    """Streaming parser of one model output."""

    def push(self, text: str) -> list[Part]:
        """Parse more text and return the parts that are certain now."""

    def finish(self, cut: bool = False) -> list[Part]:
        """Return the rest at the end of the text. `cut`: a limit ended it, so an incomplete call is dropped."""

    @property
    def broken(self) -> list[int]:
        """Indices of the calls whose arguments are incomplete or not what the model meant: with one of them the
        response has no tool calls."""


class PlainParser:
    """Parser that returns all text as content."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self, cut: bool = False) -> list[Part]:
        return []

    @property
    def broken(self) -> list[int]:
        return []
