"""Formats are found in chat templates and tokenizers; texts of real tokenizers are cut at every border of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.parsers.choice import (
    answer_tools,
    new_parser,
    reasoning_parsers,
    thinking,
    tool_call_parsers,
    tool_format,
)
from minisgl.server.core.tools import Parsing
from minisgl.tokenizer import Tokenizer
from tests.helpers.text import tokenizer_named as tokenizer
from tests.parsers.test_answer import KNOWN, THINK, F, joined


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("", (), "json"),
        ("{{ messages }}", (), "json"),
        ("... <tool_call> ...", (), "hermes"),
        ("... <|python_tag|> ...", (), "llama3_json"),
        ("Environment: ipython", (), "llama3_json"),
        ("... [TOOL_CALLS] ...", (), "mistral"),
        ("{{ messages }}", ("[TOOL_CALLS]",), "mistral"),
    ],
)
def test_the_format_of_calls_is_found(template: str, tokens: tuple[str, ...], name: str) -> None:
    ids = {token: i for i, token in enumerate(tokens)}
    assert tool_format("auto", template, ids.get).name == name
    for asked in ("hermes", "json", "pythonic"):
        assert tool_format(asked, template, ids.get).name == asked


def test_what_models_without_a_format_have_stands_in_the_table() -> None:
    """Its place there is how the gateway knows it."""
    found, named = tool_format("auto", "", {}.get), tool_format("json", "", {}.get)
    assert (found.name, found.place) == ("json", named.place)


def test_the_markers_of_thinking_are_found() -> None:
    def found(name: str, template: str) -> object:
        one = thinking(name, template)
        return one and (one.name, one.begin, one.end, one.is_open)

    assert found("auto", "{{ messages }}") is None
    assert found("auto", "x.split('</think>')") == ("qwen3", "<think>", "</think>", None)
    assert found("auto", "[THINK]a[/THINK]") == ("mistral", "[THINK]", "[/THINK]", None)
    assert found("none", "</think>") is None
    assert found("deepseek_r1", "") == ("deepseek_r1", "<think>", "</think>", True)


def test_unknown_format_names_are_refused() -> None:
    with pytest.raises(ValueError, match="nobody"):
        tool_format("nobody", "", {}.get)
    with pytest.raises(ValueError, match="nobody"):
        thinking("nobody", "")
    assert {"auto", "hermes", "qwen25"} < set(tool_call_parsers()) and {"none", "qwen3"} < set(reasoning_parsers())


def test_the_formats_of_qwen3() -> None:
    parsing = Parsing(tokenizer("qwen3"))
    assert parsing.tool_format.name == "hermes" and parsing.thinking is not None
    assert parsing.shows_tools and "enable_thinking" in parsing.variables
    assert parsing.shown(parsing.tool_format.markers) == frozenset()  # they are text there
    for kwargs, is_open in (({}, None), ({"enable_thinking": False}, False)):
        text = tokenizer("qwen3").apply_chat_template([{"role": "user", "content": "Hi"}], **kwargs)
        found = parsing.thinking_after(tokenizer("qwen3").encode(text, False), None)
        assert found is not None and found.is_open is is_open
    opened = parsing.thinking_after(tokenizer("qwen3").encode("<|im_start|>assistant\n<think>\n", False), None)
    assert opened is not None and opened.is_open


def test_a_folder_with_the_marks_of_gpt_oss_answers_in_harmony(tmp_path: Path) -> None:
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"]
    written = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict.fromkeys("", 0), merges=[]))
    written.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = tokenizers.decoders.ByteLevel()
    written.add_tokens(list("abcdefghijklmnopqrstuvwxyz"))
    written.add_special_tokens(marks)
    written.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
        "{% if thinking %}<|channel|>analysis<|message|>{{ thinking }}<|end|>{% endif %}<|start|>assistant"
    )
    found = Tokenizer.load(tmp_path)
    parsing = Parsing(found)
    assert parsing.tool_format.name == "harmony"
    assert parsing.thinking is not None and parsing.thinking.name == "harmony"
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>"
    stream = found.new_stream((), parsing.shown(parsing.tool_format.markers))
    parser = new_parser(parsing.tool_format, parsing.thinking, answer_tools({}))
    parts = []
    for one in found.encode(text, add_special_tokens=False).tolist():
        parts += parser.push(stream.push([one]))
    assert joined(parts + parser.finish())[:2] == ("hello", "hm")


def test_a_conversation_with_calls_is_written_as_it_was_read() -> None:
    """What Qwen3's template makes of a call, the parser takes apart again."""
    found = tokenizer("qwen3")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(F)}}]
    user = {"role": "user", "content": "Go on."}
    answer = {"role": "assistant", "content": "Well.", "reasoning_content": "hm", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    before = found.apply_chat_template([user], tools=[tool])
    after = found.apply_chat_template([user, answer, result], tools=[tool])
    assert json.dumps(tool) in before and after.startswith(before)
    said, rest = after.removeprefix(before).split("<|im_end|>", 1)
    assert "<tool_response>\n42\n</tool_response>" in rest
    parser = new_parser(tool_format("hermes", "", found.token_id), THINK, answer_tools({}))
    content, reasoning, [(name, arguments)] = joined(parser.push(said) + parser.finish())
    assert (content, reasoning, name, json.loads(arguments)) == ("Well.", "hm", "f", F)


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "</s>", "<|im_end|>"]
BITS = st.sampled_from(
    [*MARKERS, '{"name": "f", "arguments": {"a": "', '"}}', "Wörter 😀", " ", "[{", "}]", '\\"', "stop"]
)


@pytest.mark.parametrize(("name", "tools"), [("qwen3", "hermes"), ("mistral-v3", "mistral")])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    bits=st.lists(BITS, max_size=10),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    stops=st.sampled_from([(), ("stop",), ("CALLS", "call>x")]),
)
def test_parts_do_not_depend_on_token_borders(
    name: str, tools: str, bits: list[str], sizes: list[int], stops: tuple[str, ...]
) -> None:
    """The parts of a stream are those of the whole, whatever tokens come together."""
    found = tokenizer(name)
    tools_of = tool_format(tools, "", found.token_id)
    shown = Parsing(found, tools).shown(tools_of.markers)
    ids = found.encode("".join(bits), add_special_tokens=False).tolist()

    def taken(groups: list[list[int]]) -> object:
        stream = found.new_stream(stops, shown)
        parser = new_parser(tools_of, THINK, KNOWN)
        parts = []
        for group in groups:
            parts += parser.push(stream.push(group))
        parts += parser.push(stream.take((), True, False)[0])
        return joined(parts + parser.finish())

    groups, at = [], 0
    while at < len(ids):
        size = sizes[len(groups) % len(sizes)]
        groups.append(ids[at : at + size])
        at += size
    assert taken([ids]) == taken([[i] for i in ids]) == taken(groups)


def test_markers_that_are_no_text_are_shown_to_their_parser() -> None:
    found = tokenizer("mistral-v3")
    shown = Parsing(found, "mistral").shown(tool_format("mistral", "", found.token_id).markers)
    ids = found.encode('Hi.[TOOL_CALLS][{"name": "f", "arguments": {}}]</s>', add_special_tokens=False).tolist()
    assert found.token_id("[TOOL_CALLS]") in shown
    assert found.new_stream().push(ids).strip() == 'Hi.[{"name": "f", "arguments": {}}]'
    text = found.new_stream((), shown).push(ids)
    assert "[TOOL_CALLS]" in text and "</s>" not in text
    stream = found.new_stream(("CALLS", "[TOOL_CALLS]", "Hi.["), shown)
    assert stream.push(ids) == text and not stream.stopped  # a stop string is none within a marker
    stream = found.new_stream(('"f"',), shown)
    assert stream.push(ids) == text.split('"f"')[0] and stream.stopped
