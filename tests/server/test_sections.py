"""Parts of an answer in order, whatever pieces they come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text
from minisgl.server.sections import Closed, Grown, Opened, Sections


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
