"""Answers taken apart: formats of calls, what the model thinks, broken ones; in any pieces the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl._rust import Thinking
from minisgl.parsers import choice
from minisgl.parsers.api import CallArguments, CallBegun, MessageParser, Part, Reasoning, Text

KNOWN = choice.answer_tools({"f": {}, "g": {}})
TOOL_FORMATS = ("hermes", "json", "llama3_json", "mistral", "pythonic")
THINK = Thinking.find("qwen3", "")
assert THINK is not None
OPEN = THINK.opened(True)


def new_parser(name: str, thinking: Thinking | None = None) -> MessageParser:
    return choice.new_parser(choice.tool_format(name, "", {"[ARGS]": 1}.get), thinking, KNOWN)


def parts(name: str, pieces: list[str], thinking: Thinking | None = None, *, cut: bool = False) -> list[Part]:
    parser = new_parser(name, thinking)
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish(cut)


def joined(found: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, calls. Indices are contiguous, and nobody is argued for before it has begun."""
    content, reasoning, calls, ids = list[str](), list[str](), list[tuple[str, list[str]]](), set[str]()
    for part in found:
        match part:
            case Text(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegun(index, call_id, name):
                assert index == len(calls) and call_id not in ids
                ids.add(call_id)
                calls.append((name, []))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1].append(text)
    return "".join(content), "".join(reasoning), [(name, "".join(arguments)) for name, arguments in calls]


def taken(name: str, text: str, thinking: Thinking | None = None) -> tuple[str, str, list[tuple[str, str]]]:
    """However it is cut."""
    whole = joined(parts(name, [text], thinking))
    for size in (1, 2, 3, 7):
        assert joined(parts(name, [text[i : i + size] for i in range(0, len(text), size)], thinking)) == whole
    return whole


F: dict[str, Any] = {"a": "}\"]<tool_call>'😀", "b": [1, {"c": None}]}
JSON_F = json.dumps(F)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {JSON_F}}}\n</tool_call>', "", [("f", JSON_F)]),
        ("hermes", 'Yes. \n<tool_call>{"name": "g"}</tool_call>\n', "Yes.", [("g", "{}")]),
        ("hermes", '<tool_call>{"name":"g"}</tool_call> so\n<tool_call>{"name":"f"}</tool_call>', " so", ["g", "f"]),
        ("hermes", '<tool_call>[{"name": "f"}, {"arguments": {"x": 1}, "name": "g"}]</tool_call>', "", ["f", "g"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
        ("llama3_json", f'{{"name": "f", "parameters": {JSON_F}}}', "", [("f", JSON_F)]),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "g", "parameters": {}}', "", [("g", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", ["f", "g"]),
        ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {JSON_F}, "id": "123456789"}}]', "", [("f", JSON_F)]),
        ("mistral", f"Hm.[TOOL_CALLS]f[ARGS]{JSON_F}[TOOL_CALLS]g[ARGS]{{}}", "Hm.", [("f", JSON_F), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", "", [("f", "{}")]),
        ("json", f'\n{{"name": "f", "arguments": {JSON_F}}}', "", [("f", JSON_F)]),
        ("json", '[{"name": "f", "arguments": {}}, {"name": "g", "parameters": {}}]\n', "", ["f", "g"]),
        ("pythonic", """[f(a='it\\'s )', b=[1, {'c': None}]), g()]""", "", ["f", "g"]),
        ("pythonic", "[g(x=true, y=-1.5)]", "", [("g", '{"x": true, "y": -1.5}')]),
    ],
)
def test_calls_are_found(name: str, text: str, content: str, calls: list[Any]) -> None:
    found = taken(name, text)
    assert found[0] == content
    for (called, arguments), wanted in zip(found[2], calls, strict=True):
        assert isinstance(json.loads(arguments), dict)
        assert (called, arguments) == wanted if isinstance(wanted, tuple) else called == wanted


NO_CALLS = [
    ("hermes", "a <b> & <tool_cal\n"),
    ("hermes", 'x  <tool_call>\n{"name": "f", "argum'),
    ("hermes", "<tool_call>no JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "</tool_call> <tool_call> <tool_call>"),
    ("json", '{"answer": 42} '),
    ("json", '[1, {"name": "f"}]'),
    ("json", '{"name": "nobody", "arguments": {}}'),
    ("json", 'Call {"name": "f", "arguments": {}}'),
    ("llama3_json", '<|python_tag|>print("a")'),
    ("mistral", "[TOOL_CALLS]f{}"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[nobody(a=1)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(**{})]"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a=1e999)]"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_text_that_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    assert taken(name, text) == (text, "", [])


def test_a_call_that_breaks_off_is_broken_and_what_only_misses_brackets_is_whole() -> None:
    begun = '<tool_call>{"name": "f", "arguments": {"a": [1, '
    for text, broken, content, calls in (
        (f"Yes. {begun}", [0], "Yes.", [("f", '{"a": [1')]),
        (begun + "2}}</tool_call>", [], "", [("f", '{"a": [1, 2]}')]),
        (begun + "2", [], "", [("f", '{"a": [1, 2]}')]),
        ('<tool_call>{"name": "f", "arguments": {}\n</tool_call> b', [], " b", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}} "b"', [0], ' "b"', [("f", "{}")]),
        ('<tool_call>{"name": "f", "argument": {"a": 1}}</tool_call>', [], None, []),
    ):
        assert taken("hermes", text) == (text if content is None else content, "", calls)
        parser = new_parser("hermes")
        parser.push(text)
        parser.finish()
        assert parser.broken == broken, text


def test_arguments_come_as_they_are_generated() -> None:
    parser = new_parser("hermes")
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert [type(part) for part in parser.push('{"a": "x')] == [CallBegun, CallArguments]
    assert parser.push("y") == [CallArguments(0, "y")]
    assert parser.push('"}') == []  # unless the quote belongs to the text
    assert parser.push("}</tool_call>") == [CallArguments(0, '"}')]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", 'x  <tool_call>\n{"name": "f", "argum', "x"),
        ("hermes", "Well.\n\n<tool_call>", "Well."),
        ("hermes", "Well. <tool_ca", "Well. "),
        ("hermes", "1 <", "1 <"),
        ("json", '{"name": "f", "argum', ""),
        ("json", '{"answer": 4', '{"answer": 4'),
        ("mistral", "[TOOL_CALLS]f[ARG", ""),
    ],
)
def test_a_limit_leaves_no_marker_and_no_half_call(name: str, text: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert joined(parts(name, pieces, cut=True)) == (content, "", [])
        assert joined(parts(name, pieces))[0] == text


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('```json\n{"name": "f", "arguments": {"a": 1}}\n```', "", [("f", '{"a": 1}')]),
        ('```\n[{"name": "f", "arguments": {}}]\n```\n```json\n{"name": "g", "arguments": {}}```', "", ["f", "g"]),
        ('```json\n{"name": "f"}\n```', None, []),
        ('```json\n{"name": "nobody", "arguments": {}}\n```', None, []),
        ('Like {"name": "f", "arguments": {}}', None, []),
        ("```python\nf()\n```", None, []),
    ],
)
def test_an_object_at_the_beginning_may_be_a_call(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    """Small models that know a marker write a block of code instead."""
    found = taken(name, text)
    assert found[0] == (text if content is None else content)
    assert [one if isinstance(wanted, tuple) else one[0] for one, wanted in zip(found[2], calls, strict=True)] == calls


def test_text_comes_as_it_is_generated() -> None:
    parser = new_parser("hermes")
    assert parser.push("a <") == [Text("a")]
    assert parser.push("b> c") == [Text(" <b> c")]


@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning"),
    [
        ("<think>\nhm \n</think>\n\nYes.", THINK, "Yes.", "hm"),
        ("\n<think>\n\n</think>\n\nYes. ", THINK, "Yes. ", ""),
        ("<think>a </thin", THINK, "", "a </thin"),
        (" Yes <think>a</think>", THINK, " Yes <think>a</think>", ""),
        ("hm\n</think>\nYes.", OPEN, "Yes.", "hm"),
        ("<think>hm</think>Yes.", OPEN, "Yes.", "hm"),
        ("hm", OPEN, "", "hm"),
        ("", THINK, "", ""),
    ],
)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_reasoning_is_separated_from_content(
    name: str, text: str, thinking: Thinking, content: str, reasoning: str
) -> None:
    assert taken(name, text, thinking) == (content, reasoning, [])


def test_calls_are_found_after_reasoning() -> None:
    thought = '<think><tool_call>{"name": "g"}</think>\n'
    for name, call in (("hermes", '<tool_call>{"name": "f"}</tool_call>'), ("json", '{"name": "f"}')):
        assert taken(name, thought + call, THINK) == ("", '<tool_call>{"name": "g"}', [("f", "{}")])


def test_ids_of_mistral_have_nine_characters() -> None:
    [begun] = [part for part in parts("mistral", ["[TOOL_CALLS]f[ARGS]{}"]) if isinstance(part, CallBegun)]
    assert len(begun.id) == 9 and begun.id.isalnum()


# ------------------------------------------------------------------------------------------------------ hostile texts

MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>"]
BITS = st.sampled_from(
    [
        *MARKERS,
        "</think>",
        *('{"name": "f"', ', "arguments": ', '{"a": "', '"}', "f(", "a=", "null", '"parameters"', "f", "g"),
        *"{}[]()'\",;:< \n\\😀",
    ]
)


def cuts(text: str, places: list[int]) -> Iterator[str]:
    at = 0
    for place in sorted({place % (len(text) + 1) for place in places}):
        yield text[at:place]
        at = place
    yield text[at:]


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.lists(BITS, max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from([None, THINK, OPEN]),
)
def test_pieces_change_nothing_and_nothing_is_lost(
    text: str, places: list[int], name: str, thinking: Thinking | None
) -> None:
    whole = joined(parts(name, [text], thinking))
    assert joined(parts(name, list(cuts(text, places)), thinking)) == whole
    assert joined(parts(name, list(text), thinking)) == whole
    content, reasoning, calls = whole
    if not calls and not (thinking and (reasoning or thinking.begin in text or thinking.end in text)):
        assert content == text or (thinking is not None and thinking.is_open)
    if calls and thinking is None:  # what is kept of it is in its order
        rest = iter(text)
        assert name == "pythonic" or all(char in rest for char in content)


@pytest.mark.parametrize(
    ("name", "before", "bit", "after"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x\\\\", '"}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": "', 'x\\"', '"}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "[", ""),
        ("hermes", '<tool_call>{"name": "', "f", ""),
        ("hermes", "a", " \n ", "<tool_call>"),
        ("hermes", "", "<tool_call", ""),
        ("hermes", "", '<tool_call>{"a"', ""),
        ("hermes", "", '<tool_call>{"name":"f"}</tool_call>', ""),
        ("mistral", "[TOOL_CALLS]", "f", ""),
        ("json", '{"name": "f", "id": "', "xy", ""),
        ("pythonic", "[f(a='", "xy", "')]"),
        ("llama3_json", "", "<|python_tag|>", ""),
    ],
)
def test_work_is_linear_in_the_text(name: str, before: str, bit: str, after: str) -> None:
    """Sixteen times the text is 16 times the work, or 256 where it is quadratic: 64 is far from both on any machine."""

    def seconds(count: int) -> float:
        began = time.thread_time()
        parts(name, [before, *[bit] * count, after])
        return time.thread_time() - began

    most = 64 * min(seconds(2_500) for _ in range(3)) + 0.05
    assert any(seconds(40_000) <= most for _ in range(3))


@pytest.mark.parametrize("thinking", ["qwen3", "mistral", "gemma4", "command"])
def test_white_space_before_an_answer_without_thoughts_stays_before_it(thinking: str) -> None:
    for size in (1, 3, 50):
        parser = choice.new_parser(None, Thinking.find(thinking, ""), None)
        text = "\n\nhello\n\nworld "
        found = [part for i in range(0, len(text), size) for part in parser.push(text[i : i + size])]
        assert joined(found + parser.finish(False)) == (text, "", [])


@pytest.mark.parametrize("size", ["--5", "--1.5", "-+1", "+-.5"])
def test_a_number_has_one_sign(size: str) -> None:
    known = choice.answer_tools({"f": {"properties": {"a": {"type": "integer"}}}})
    parser = choice.new_parser(choice.tool_format("hermes", "", {}.get), None, known)
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {size}}}}}</tool_call>'
    _, _, calls = joined(parser.push(text) + parser.finish(False))
    assert parser.broken or json.loads(calls[0][1]) == {"a": size}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_megabyte_of_arguments_is_parsed(name: str) -> None:
    value = "a\\n😀" * 2**18
    texts = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {{"a": "{value}"}}}}</tool_call>',
        "mistral": f'[TOOL_CALLS]f[ARGS]{{"a": "{value}"}}',
        "pythonic": f'[f(a="{value}")]',
    }
    text = texts.get(name, f'{{"name": "f", "arguments": {{"a": "{value}"}}}}')
    content, _, calls = joined(parts(name, [text[i : i + 4] for i in range(0, len(text), 4)]))
    assert content == "" and [called for called, _ in calls] == ["f"]
    assert json.loads(calls[0][1]) == {"a": json.loads(f'"{value}"')}
