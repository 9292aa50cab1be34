"""One call of the model with a conversation, without a server: what is counted as thought."""

from __future__ import annotations

from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.frontend.output_processor import Delta
from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text
from minisgl.parsers.choice import thinking
from minisgl.sampling_params import SamplingParams
from minisgl.server.core.sections import Closed, Grown, JoinedText, Opened, Sections
from minisgl.server.core.turn import Turn, TurnChoice
from minisgl.tokenizer import Tokenizer

END = 7  # the token that ends what is thought


@pytest.mark.parametrize("is_shown", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize(("said", "count"), [("Yes.", 0), ("<think>hm</think>Yes.", 3)])
def test_only_what_was_thought_is_counted(said: str, count: int, is_shown: bool) -> None:
    """Also once it was asked for, as an answer that comes whole does."""
    found = thinking("qwen3", "")
    turn = Turn([], SamplingParams(), thinking=found, think_end=END)
    choice = turn.choice()
    choice.take(Delta(0, said, "stop"))
    if is_shown:
        assert (choice.content, choice.reasoning) == ("Yes.", "hm" if count else "")
    assert turn.num_thought(choice, [1, 2, END, 3], Tokenizer.echo()) == count


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

    @property
    def broken(self) -> list[int]:
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


def shown(sections: Sections) -> list[tuple[str, str, str]]:
    return [(one.kind, one.name, one.text) for one in sections.all]


def test_parts_become_sections_in_their_order() -> None:
    sections = Sections()
    parts: list[Part] = [
        Reasoning("so"),
        Text("\n\n"),
        Text("first "),
        Text("then"),
        CallBegun(0, "a", "f"),
        CallArguments(0, '{"x"'),
        CallArguments(0, ":1}"),
        Text("\n"),
        CallBegun(1, "b", "g"),
        Text("end"),
    ]
    sections.take(parts)
    sections.finish()
    wanted = [("reasoning", "", "so"), ("text", "", "\n\nfirst then"), ("call", "f", '{"x":1}'), ("call", "g", "")]
    assert shown(sections) == [*wanted, ("text", "", "end")]


def test_blank_text_alone_is_text() -> None:
    sections = Sections()
    assert sections.take([Text(" "), Text("\n")]) == []
    assert [type(change) for change in sections.finish()] == [Opened, Grown, Closed]
    assert shown(sections) == [("text", "", " \n")]
    assert sections.finish() == []


PIECES = st.lists(st.sampled_from(["text", "reasoning", "call", "blank"]), max_size=8)


@given(PIECES, st.data())
def test_pieces_do_not_matter(kinds: list[str], data: st.DataObject) -> None:
    """Whole parts make the sections of their characters; changes joined are the sections; one is open at a time."""
    whole, pieces, num_calls = list[Part](), list[Part](), 0
    for kind in kinds:
        text = " \n" if kind == "blank" else data.draw(st.text("ab {", min_size=1, max_size=4))
        if kind == "call":
            begun = CallBegun(num_calls, f"id{num_calls}", "f")
            whole += [begun, CallArguments(num_calls, text)]
            pieces += [begun, *(CallArguments(num_calls, one) for one in text)]
            num_calls += 1
        else:
            make = Reasoning if kind == "reasoning" else Text
            whole.append(make(text))
            pieces += [make(one) for one in text]
    first, second = Sections(), Sections()
    first.take(whole)
    first.finish()
    changes = [change for piece in pieces for change in second.take([piece])] + second.finish()
    assert shown(first) == shown(second)
    texts: list[str] = []
    is_open = False
    for change in changes:
        if isinstance(change, Opened):
            assert not is_open and change.section.index == len(texts)
            texts.append("")
        elif isinstance(change, Grown):
            assert is_open and change.section.index == len(texts) - 1
            texts[-1] += change.text
        is_open = not isinstance(change, Closed)
    assert not is_open and texts == [text for _, _, text in shown(second)]
