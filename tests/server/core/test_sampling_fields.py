"""The form of an answer, asked for in any of the fields that clients know: one grammar for the engine, or 400."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.grammar import accepts
from tests.helpers.server import Frontend, chat_body, check_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
UNIQUE = {"type": "array", "uniqueItems": True, "items": {"format": "int64-date"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
LARK = "start: A | B\nA: /a+/\nB: /b+/"
GBNF = 'root ::= "a"+ | "b"+'
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = (CHAT, TEXT, GENERATE)
ASKED = [
    ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
    ({"response_format": JSON_SCHEMA}, '{"a": 1}', '{"a": "x"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, '{"x": 1}', "1"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a": 1}', '{"b": 1}'),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', '{"b": 1}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 1}', '{"b": 1}'),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, '{"a":1}', '{"a": 1}'),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, '{"a": 1}', '{"a":  1}'),
    ({"structured_outputs": {"regex": "a|b"}}, "b", "ab"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "maybe"),
    ({"structured_outputs": {"grammar": LARK}}, "aa", "ab"),
    ({"guided_json": SCHEMA}, '{"a": 1}', '{"b": 1}'),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, '{ "a": 1 }', '{  "a": 1 }'),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, '{"a": 1}', '{"b": 1}'),
    ({"guided_regex": "[ab]{2}"}, "ab", "abc"),
    ({"guided_choice": ["yes", "no"]}, "yes", "y"),
    ({"guided_grammar": GBNF}, "bb", "ab"),
    ({"json_schema": json.dumps(SCHEMA)}, '{"a": 1}', '{"b": 1}'),
    ({"json_schema": SCHEMA}, '{"a": 1}', '{"b": 1}'),
    ({"regex": "a+"}, "aaa", "b"),
    ({"ebnf": GBNF}, "aa", "ab"),
    ({"grammar": GBNF}, "aa", "ab"),
    ({"regex": "a+", "guided_regex": "a+"}, "a", "b"),
    ({"response_format": JSON_SCHEMA, "json_schema": json.dumps(SCHEMA)}, '{"a": 1}', '{"b": 1}'),
]


def body(path: str, text: str) -> dict[str, Any]:
    return chat_body(text) if path == CHAT else {"prompt": text}


@pytest.mark.parametrize(("asked", "yes", "no"), ASKED, ids=lambda one: "-".join(one) if isinstance(one, dict) else "")
def test_every_field_becomes_a_grammar(
    http: httpx.Client, server: Frontend, asked: dict[str, Any], yes: str, no: str
) -> None:
    found = []
    for i, path in enumerate((*PATHS, GENERATE)):
        more = {"sampling_params": asked} if i == 3 else asked
        marked = f"form {ASKED.index((asked, yes, no))} {i}."
        answer = http.post(path, json={**body(path, marked), **more, "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        found.append(server.engine.wait_for_request(marked).sampling.grammar)
    assert len(set(found)) == 1 and found[0]
    assert accepts(found[0], yes) and not accepts(found[0], no)


@pytest.mark.parametrize(
    "nothing",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "json": None}},
        {"guided_choice": [], "grammar": "", "regex": None},
        {"guided_whitespace_pattern": " "},
    ],
    ids=repr,
)
def test_neutral_values_have_no_grammar(http: httpx.Client, server: Frontend, nothing: dict[str, Any]) -> None:
    for path in PATHS:
        marked = f"free {sorted(nothing)}{path}"
        assert http.post(path, json={**body(path, marked), **nothing}).status_code == 200
        assert server.engine.wait_for_request(marked).sampling.grammar is None


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"anyOf": {}}}}}},
            "response_format.json_schema.schema.items.anyOf",
            "must be a list",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE, "strict": True}}},
            "response_format.json_schema.schema.uniqueItems",
            "`strict` leaves no keyword out",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0", "text"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "None"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "false",
        ),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"guided_json": {"type": "strnig"}}, "guided_json", "strnig"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "must be Lark or GBNF"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "guidance"),
        ({"regex": "a", "ebnf": GBNF}, "ebnf", "give one of regex and ebnf"),
        ({"regex": "a", "guided_regex": "b"}, "regex", "give one of guided_regex and regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "outputs.regex",
        ),
        ({"structural_tag": {}}, "structural_tag", "not supported"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"regex": "a", "min_tokens": 1}, "min_tokens", "grammar"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_refused_before_the_engine_hears_of_it(
    http: httpx.Client, server: Frontend, asked: dict[str, Any], param: str, words: str
) -> None:
    for path in PATHS:
        error = check_error(http.post(path, json={**body(path, "refused"), **asked}), 400)
        assert error["param"] == param and error["message"].startswith(param) and words in error["message"]
    if "min_tokens" not in asked:
        nested = check_error(http.post(GENERATE, json={"prompt": "refused", "sampling_params": asked}), 400)
        assert nested["param"] == f"sampling_params.{param}"
    assert not server.engine.requests("refused")


SAID = [{"role": "user", "content": "say:[]"}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": UNIQUE}}}
LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": SAID, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        "tools.0.function.parameters.properties.a",
    ),
    ("/v1/completions", {"prompt": "say:[]", "guided_json": UNIQUE}, "guided_json"),
    (
        "/generate",
        {"text": "say:[]", "sampling_params": {"json_schema": json.dumps(UNIQUE)}},
        "sampling_params.json_schema",
    ),
    ("/completion", {"prompt": "say:[]", "json_schema": UNIQUE}, "json_schema"),
    (
        "/v1/responses",
        {"input": "say:[]", "text": {"format": {"type": "json_schema", "name": "x", "schema": UNIQUE}}},
        "text.format.schema",
    ),
    ("/api/chat", {"messages": SAID, "format": UNIQUE, "stream": False}, "format"),
    ("/api/generate", {"prompt": "say:[]", "raw": True, "format": UNIQUE, "stream": False}, "format"),
    (
        "/v1/messages",
        {
            "messages": SAID,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
        },
        "tools.0.input_schema.properties.a",
    ),
]


@pytest.mark.parametrize(("path", "asked", "place"), LEFT_OUT, ids=lambda one: str(one)[:60])
def test_keywords_that_are_left_out_are_named_as_the_client_wrote_them(
    http: httpx.Client, path: str, asked: dict[str, Any], place: str
) -> None:
    answer = http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-minisgl-ignored"] == f"{place}.uniqueItems, {place}.items.format"


def test_what_anthropic_s_api_promises_is_kept_or_refused(http: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": UNIQUE}
    answer = http.post("/v1/messages", json={"messages": SAID, "max_tokens": 9, "output_config": {"format": form}})
    assert answer.status_code == 400 and "output_config.format.schema.uniqueItems" in answer.text
