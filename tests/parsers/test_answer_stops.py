"""Stop strings end the content of an answer: reasoning, markers and calls are not searched. By both text paths,
whatever tokens come together."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from minisgl import _rust
from minisgl.parsers import choice
from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text
from minisgl.tokenizer.echo import echo_json
from minisgl.tokenizer.reference import ReferenceTokenizer

THINK = _rust.Thinking.find("qwen3", "")
assert THINK is not None
OPEN = THINK.opened(True)
KNOWN = choice.answer_tools({"save": {"properties": {"body": {"type": "string"}}}})
QWEN = "<tool_call>\n<function=save>\n<parameter=body>\n{}\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{{"name": "save", "arguments": {{"body": "{}"}}}}\n</tool_call>'


@cache
def tokenizers() -> tuple[_rust.TextTokenizer, ReferenceTokenizer]:
    return _rust.TextTokenizer(text=echo_json()), ReferenceTokenizer(text=echo_json())


def taken(
    text: str, stops: list[str], tools: str | None, thinking: Any, sizes: int, path: int
) -> tuple[str, str, list[Any], str | None]:
    """Reasoning, content, arguments of calls, the stop string that was found."""
    format = None if tools is None else choice.tool_format(tools, "", {"[ARGS]": 1}.get)
    stream = tokenizers()[path].stream(stops, [], 0, (format, thinking, KNOWN))
    parser = choice.new_parser(format, thinking, KNOWN)
    ids, parts = list(text.encode()), list[Part]()
    for at in range(0, len(ids), sizes):
        if not stream.stopped:
            parts += parser.push(stream.push(ids[at : at + sizes]))
    if not stream.stopped:
        parts += parser.push(stream.take((), True, False)[0])
    parts += parser.finish()
    joined = {kind: "".join(one.text for one in parts if isinstance(one, kind)) for kind in (Text, Reasoning)}
    calls = [
        "".join(one.text for one in parts if isinstance(one, CallArguments) and one.index == call.index)
        for call in parts
        if isinstance(call, CallBegun)
    ]
    assert parser.broken == []
    return joined[Reasoning], joined[Text], [json.loads(call) for call in calls], stream.matched_stop


def body(text: str) -> list[Any]:
    return [{"body": text}]


@pytest.mark.parametrize(
    ("text", "stops", "tools", "thinking", "expected"),
    [
        ("The Answer: is easy</think>7", ["Answer:"], None, OPEN, ("The Answer: is easy", "7", [], None)),
        ("one\n\ntwo</think>\n\nthree\n\nfour", ["\n\n"], None, OPEN, ("one\n\ntwo", "three", [], "\n\n")),
        ("一四二</think>三四五", ["四"], "hermes", OPEN, ("一四二", "三", [], "四")),
        ("a</think>hello", ["think"], None, OPEN, ("a", "hello", [], None)),
        ("a</think>hello", ["</"], "hermes", OPEN, ("a", "hello", [], None)),
        ("<think>a</think>hel</lo", ["</"], "hermes", THINK, ("a", "hel", [], "</")),
        ("STOP</think>STOP", ["STOP"], None, OPEN, ("STOP", "", [], "STOP")),
        ("ST</think>OP", ["STOP"], None, OPEN, ("ST", "OP", [], None)),
        (QWEN.format("blue"), ["<function="], "qwen3_coder", None, ("", "", body("blue"), None)),
        (QWEN.format("blue"), ["</tool_call>"], "qwen3_coder", None, ("", "", body("blue"), None)),
        (QWEN.format("hello STOP now"), ["STOP"], "qwen3_coder", None, ("", "", body("hello STOP now"), None)),
        (HERMES.format("hello STOP now"), ["STOP", "\n"], "hermes", None, ("", "", body("hello STOP now"), None)),
        ("So:\n\n" + HERMES.format("a"), ["\n\n"], "hermes", None, ("", "So:", body("a"), None)),
        (HERMES.format("a") + "\nDone. STOP x", ["STOP"], "hermes", None, ("", "\nDone. ", body("a"), "STOP")),
        ("Hello STOP", ["STOP"], "hermes", None, ("", "Hello ", [], "STOP")),
        ("Hello STO", ["STOP"], "hermes", None, ("", "Hello STO", [], None)),
        ("Hello\n", ["\n"], "hermes", OPEN.opened(False), ("", "Hello", [], "\n")),
        ("<tool_call>no STOP</tool_call>", ["STOP"], "hermes", None, ("", "<tool_call>no ", [], "STOP")),
        ("x<|channel|>", ["<|"], "hermes", None, ("", "x", [], "<|")),
        (
            "<|channel|>analysis<|message|>STOP<|end|><|start|>assistant<|channel|>final<|message|>a STOP b",
            ["STOP"],
            "harmony",
            _rust.Thinking.find("harmony", ""),
            ("STOP", "a ", [], "STOP"),
        ),
    ],
)
@pytest.mark.parametrize("path", [0, 1], ids=["rust", "reference"])
def test_stop_strings_are_searched_in_content_alone(
    text: str, stops: list[str], tools: str | None, thinking: Any, expected: Any, path: int
) -> None:
    for size in (1, 2, 3, 5, 1000):
        assert taken(text, stops, tools, thinking, size, path) == expected


def test_an_answer_that_is_not_taken_apart_is_searched_as_it_is() -> None:
    for one in tokenizers():
        stream = one.stream(["think"], [], 0)
        assert stream.push(list(b"a</think>b")) == "a</" and stream.stopped
