"""A growing text: what it is, and that nothing is joined before it is asked for."""

from __future__ import annotations

from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.output_processor import Delta
from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text
from minisgl.server.joined_text import JoinedText
from minisgl.server.sections import Sections
from minisgl.server.turn import TurnChoice


@given(st.lists(st.text(max_size=3) | st.none(), max_size=12))
def test_it_is_its_pieces_whenever_it_is_asked(pieces: list[str | None]) -> None:
    """None: asked."""
    grown, whole = JoinedText(), ""
    for piece in pieces:
        if piece is None:
            assert str(grown) == whole and bool(grown) == bool(whole)
        else:
            grown.add(piece)
            whole += piece
    assert str(grown) == whole and bool(grown) == bool(whole)


class Uncopied(str):
    """A piece that goes into no other text by `+`."""

    __slots__ = ()

    def __add__(self, other: str) -> NoReturn:
        raise AssertionError("copied")

    __radd__ = __add__


class Ready:
    """A parser of an answer that is already taken apart: one part for each piece."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = iter(parts)

    def push(self, text: str) -> list[Part]:
        return [next(self._parts)]

    def finish(self) -> list[Part]:
        return []


GROWING: list[list[Part]] = [
    [Text(Uncopied(" ")) for _ in range(3)],
    [Text(Uncopied("ab")) for _ in range(3)],
    [Reasoning(Uncopied("ab")) for _ in range(3)],
    [CallBegun(0, "id", "f"), *(CallArguments(0, Uncopied("ab")) for _ in range(3))],
]


@pytest.mark.parametrize("parts", GROWING, ids=["blank", "text", "reasoning", "call"])
def test_an_answer_that_grows_is_not_copied(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that has come would be copied for each piece: the time of an answer would grow with its square."""

    def joined(self: JoinedText) -> NoReturn:
        raise AssertionError("joined")

    sections, choice = Sections(), TurnChoice(Ready(parts))
    sections.take(parts[:1])  # with the blanks before it
    choice.take(Delta(0, "", None))
    whole = "".join(part.text for part in parts if not isinstance(part, CallBegun))
    with monkeypatch.context() as while_growing:
        while_growing.setattr(JoinedText, "__str__", joined)
        for part in parts[1:]:
            sections.take([part])
            choice.take(Delta(0, "", None))
    sections.finish()
    assert sections.all[0].text == whole
    assert "".join((choice.content, choice.reasoning, *(call.arguments for call in choice.calls))) == whole
