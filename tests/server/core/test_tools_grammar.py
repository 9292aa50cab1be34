"""Grammars of answers with calls: what they accept, the parser of the format finds; what they must not accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from minisgl._rust import Thinking, ToolFormat
from minisgl.grammar.check import validate
from minisgl.grammar.sources import GrammarSource
from minisgl.parsers.api import CallArguments, CallBegun
from minisgl.parsers.choice import answer_tools, new_parser, tool_format
from minisgl.sampling_params import ParamError
from minisgl.server.core import tools as server_tools
from minisgl.server.core.tools import Tool, ToolUse, TurnGrammar, needs_grammar, tool_use
from tests.helpers.text import library as text_library
from tests.helpers.text import tokenizer_named as tokenizer
from tests.parsers.test_answer import THINK, TOOL_FORMATS

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}),
    Tool.model_validate({"type": "function", "function": {"name": "now"}}),
]
NAMED = {"type": "function", "function": {"name": "weather"}}
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'
BAD = '{"name": "weather", "arguments": {"town": "Paris"}}'


def python(call: str) -> str:
    found = json.loads(call)
    fields = ", ".join(f"{name}={json.dumps(value)}" for name, value in found["arguments"].items())
    return f"{found['name']}({fields})"


TEXTS: dict[str, Callable[..., str]] = {
    "hermes": lambda *calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
    "mistral": lambda *calls: f"[TOOL_CALLS][{', '.join(calls)}]",
    "json": lambda *calls: calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]",
    "llama3_json": lambda *calls: "; ".join(calls).replace("arguments", "parameters"),
    "pythonic": lambda *calls: f"[{', '.join(map(python, calls))}]",
}


@cache
def library(name: str) -> Any:
    return LLTokenizer(text_library(name).to_str(), n_vocab=tokenizer(name).num_ids)


def accepts(name: str, grammar: str, text: str) -> bool:
    matcher = LLMatcher(library(name), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(name).encode(text, add_special_tokens=False).tolist()
    return int(matcher.try_consume_tokens(ids)) == len(ids) and bool(matcher.is_accepting())


def asked(choice: Any, parallel: bool | None = None) -> ToolUse:
    found = tool_use(TOOLS, choice, parallel)
    assert found is not None
    return found


def grammar(name: str, tools: str | None, use: ToolUse | None, thinking: Thinking | None = None, **more: Any) -> str:
    token_id = tokenizer(name).token_id
    calls = None if tools is None else tool_format(tools, "", token_id)
    found = TurnGrammar(token_id, thinking, calls, use, **more)
    return found.made().text


def calls(tools: str, text: str) -> list[tuple[str, Any]]:
    parser = new_parser(tool_format(tools, "", {}.get), THINK, answer_tools({"weather": {}, "now": {}}))
    parts = parser.push(text) + parser.finish()
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    return list(zip(names, map(json.loads, arguments), strict=True))


KINDS = [("echo", tools) for tools in TOOL_FORMATS] + [("qwen3", "hermes"), ("mistral-v3", "mistral")]


@pytest.mark.parametrize(("name", "tools"), KINDS)
def test_calls_that_are_required(name: str, tools: str) -> None:
    text = TEXTS[tools]
    required = grammar(name, tools, asked("required", True))
    for accepted in (text(PARIS), text(NOW), text(PARIS, NOW), text(NOW, NOW, PARIS)):
        assert accepts(name, required, accepted)
        assert len(calls(tools, accepted)) == accepted.count("now") + accepted.count("weather")
    for refused in ("Hello", "", text(BAD), text(PARIS) + " bye", text('{"name": "x", "arguments": {}}')):
        assert not accepts(name, required, refused)
    one = grammar(name, tools, asked("required"))  # unless several are asked for
    assert accepts(name, one, text(NOW)) and not accepts(name, one, text(NOW, NOW))
    named = grammar(name, tools, asked(NAMED))
    assert accepts(name, named, text(PARIS))
    assert not accepts(name, named, text(NOW)) and not accepts(name, named, text(PARIS, PARIS))


@pytest.mark.parametrize(("name", "tools"), KINDS)
def test_where_the_model_decides_only_calls_are_bound(name: str, tools: str) -> None:
    text = TEXTS[tools]
    free = grammar(name, tools, asked("auto"))
    for accepted in ("Hello <b> {}", "", text(PARIS), text(NOW, PARIS), text('{"name": "now", "arguments": {"x": 1}}')):
        assert accepts(name, free, accepted), accepted
    assert not accepts(name, free, text(BAD))
    assert accepts(name, free, "Well. " + text(PARIS)) or tools not in ("hermes", "mistral")
    one = grammar(name, tools, asked("auto", False))
    assert accepts(name, one, text(PARIS)) and not accepts(name, one, text(PARIS, PARIS))


@pytest.mark.parametrize(("name", "tools"), KINDS)
def test_what_is_thought_is_free(name: str, tools: str) -> None:
    answer = TEXTS[tools](PARIS)
    for source in (None, GrammarSource("json_schema", CITY, "response_format")):
        use = asked("required") if source is None else None
        answer = TEXTS[tools](PARIS) if source is None else '{"city": "Rome"}'
        maybe = grammar(name, tools, use, THINK, source=source)
        assert accepts(name, maybe, answer) and accepts(name, maybe, f"<think>\nhm {{\n</think>\n\n{answer}")
        opened = grammar(name, tools, use, THINK.opened(True), source=source)
        assert accepts(name, opened, f"\nhm {{</think>\n\n{answer}") and not accepts(name, opened, answer)
        closed = grammar(name, tools, use, THINK.opened(False), source=source)
        assert accepts(name, closed, answer) and not accepts(name, closed, f"<think>hm</think>{answer}")


def test_a_form_and_calls() -> None:
    source = GrammarSource("json_schema", CITY, "response_format")
    found = grammar("echo", "hermes", asked("auto"), source=source)
    assert accepts("echo", found, '{"city": "Rome"}') and accepts("echo", found, TEXTS["hermes"](PARIS))
    assert not accepts("echo", found, "Hello")


def test_only_what_binds_needs_one() -> None:
    loose = [Tool.model_validate({"type": "function", "function": {"name": "now"}})]
    assert not needs_grammar(None) and not needs_grammar(tool_use(loose, "auto", None))
    assert needs_grammar(tool_use(loose, "auto", False)) and needs_grammar(tool_use(loose, "required", None))
    assert needs_grammar(tool_use(TOOLS, None, None))


def test_what_is_wrong_with_a_tool_is_named() -> None:
    bad = Tool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"required": True}}}}}
    )
    with pytest.raises(ParamError) as error:
        grammar("echo", "json", tool_use([*TOOLS, bad], "required", None))
    assert error.value.field == "tools.2.function.parameters.properties.a.required"


def test_many_tools_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each by itself where one is refused, to name it."""
    compiled = 0

    def counted(text: str, field: str, value: object = None) -> None:
        nonlocal compiled
        compiled += 1
        validate(text, field, value)

    monkeypatch.setattr(server_tools, "validate", counted)
    functions = [{"name": f"f{i}", "parameters": CITY} for i in range(256)]
    many = [Tool.model_validate({"type": "function", "function": function}) for function in functions]
    grammar("echo", "json", tool_use(many, "required", None))
    assert compiled == 2
    many[200].function.parameters = {"type": "object", "properties": {"a": {"type": "no-such"}}}
    with pytest.raises(ParamError) as error:
        grammar("echo", "json", tool_use(many, "required", None))
    assert error.value.field == "tools.200.function.parameters" and compiled == 3
    for tool in many:
        tool.function.parameters = {"properties": {"x" * 2000: {}}}
    with pytest.raises(ParamError) as error:
        grammar("echo", "json", tool_use(many, "required", None))
    assert error.value.field == "tools"


def test_what_arguments_need_not_obey_is_named_and_of_strict_tools_refused() -> None:
    """Where the library alone finds it out, too, and in tools that are asked for together."""
    for schema, keyword in (
        ({"items": {"uniqueItems": True}}, "items.uniqueItems"),
        ({"pattern": "a(?=b)"}, "pattern"),
    ):
        parameters = {"type": "object", "properties": {"a": schema}}
        function = {"name": "f", "parameters": parameters}
        tools = [*TOOLS, Tool.model_validate({"type": "function", "function": function})]
        place = f"tools.2.function.parameters.properties.a.{keyword}"
        use = tool_use(tools, "required", None)
        made = TurnGrammar(
            tokenizer("echo").token_id, None, tool_format("json", "", tokenizer("echo").token_id), use
        ).made()
        assert made.left_out == (place,)
        tools[2].function.strict = True
        with pytest.raises(ParamError, match="strict") as error:
            grammar("echo", "json", tool_use(tools, "auto", None))
        assert error.value.field == place


def test_arguments_are_those_that_are_named() -> None:
    """A function without parameters gets none, one without a schema of them any."""
    schemas = ({"type": "object", "properties": {}}, {"type": "object"}, CITY)
    for schema, allowed in zip(schemas, (False, True, False), strict=True):
        tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
        text = grammar("echo", "json", tool_use([tool], "required", None))
        assert accepts("echo", text, '{"name": "f", "arguments": {"city": "x", "b": 1}}') is allowed


OTHERS = [name for name in ToolFormat.names() if name not in TOOL_FORMATS]


@pytest.mark.parametrize("tools", sorted({tool_format(name, "", {}.get).name for name in OTHERS} - set(TOOL_FORMATS)))
def test_calls_in_the_form_of_a_model(tools: str) -> None:
    """What the grammar lets a model write, the parser reads; what breaks the schema is refused."""

    def written(name: str, arguments: str) -> str:
        return tool_format(tools, "", {}.get).written(name, arguments).removesuffix("<|call|>")

    paris, now, bad = written("weather", '{"city": "Paris"}'), written("now", "{}"), written("weather", '{"town": "x"}')
    assert calls(tools, paris) == [("weather", {"city": "Paris"})] and calls(tools, now) == [("now", {})]
    required, named = grammar("echo", tools, asked("required")), grammar("echo", tools, asked(NAMED))
    free = grammar("echo", tools, asked("auto"))
    for text, by_required, by_named, by_free in (
        (paris, True, True, True),
        (now, True, False, True),
        (bad, False, False, False),
        (written("nobody", "{}"), False, False, False),
    ):
        found = [accepts("echo", one, text) for one in (required, named, free)]
        assert found == [by_required, by_named, by_free], text
    assert not accepts("echo", required, "Hello") and not accepts("echo", required, f"{now}\n{now}")
    text = "<|channel|>final<|message|>Hello" if tools == "harmony" else "Hello {} [x]"
    assert accepts("echo", free, text)
    answer = "<|start|>assistant" * (tools == "harmony") + paris
    kind = Thinking.find("harmony" if tools == "harmony" else "qwen3", "")
    assert kind is not None
    thinks = grammar("echo", tools, asked("required"), kind)
    assert accepts("echo", thinks, f"{kind.begin}hm {{{kind.end}{answer}") and accepts("echo", thinks, paris)


def test_a_model_too_small_for_its_marker_calls_in_a_block_of_code() -> None:
    free = grammar("echo", "hermes", asked("auto"))
    for text in (PARIS, f"```json\n{PARIS}\n```"):
        assert accepts("echo", free, text) and calls("hermes", text) == [("weather", {"city": "Paris"})]
        assert not accepts("echo", free, text.replace("city", "town"))
    assert accepts("echo", free, "```json\n[1]\n```")


def test_a_budget_of_thinking_holds() -> None:
    """Of Qwen3's tokens: after so many only the end of thinking may come; before, it comes where the model wants."""
    found, end = tokenizer("qwen3"), tokenizer("qwen3").token_id("</think>")
    for thinking, before in ((THINK, "<think>"), (THINK.opened(True), "")):
        for use, answer in ((None, "\nYes."), (asked("auto"), TEXTS["hermes"](PARIS))):
            text = grammar("qwen3", None if use is None else "hermes", use, thinking, budget=8)
            assert accepts("qwen3", text, f"{before}a b c</think>{answer}")
            matcher = LLMatcher(library("qwen3"), text, log_level=0)
            ids = found.encode(before + "one two three four five six seven eight nine ten", False).tolist()
            assert matcher.try_consume_tokens(ids) == len(ids) - 2
            assert matcher.compute_ff_tokens() == [end]
