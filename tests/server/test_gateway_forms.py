"""What the gateway is told of tools and of forms of answers. That it makes the same of it as the Python server is shown
over sockets (tests/gateway)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.server.gateway_forms import form_of
from minisgl.server.tools import Parsing
from tests.helpers.thinking import thinking_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA, "x": 1}} for name in ("get", "put")]
PLAIN = {"type": "function", "function": {"name": "get", "parameters": SCHEMA}}


def asked(thinking: str, **fields: Any) -> Any:
    answer = form_of(Parsing(thinking_tokenizer(has_tokens=True)))
    found = answer(json.dumps({"thinking": thinking, "fields": fields}))
    return None if found is None else json.loads(found)


def test_tools_are_as_the_template_takes_them() -> None:
    found = asked("later", tools=TOOLS)
    assert found["tools"] == [PLAIN, {**PLAIN, "function": {**PLAIN["function"], "name": "put"}}]
    assert (found["calls"], found["named_call"], found["needs_grammar"], found["grammar"]) == (True, False, False, None)
    assert asked("later", tools=TOOLS, tool_choice="none")["tools"] == []
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get"}}]}
    found = asked("later", tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (found["tools"], found["needs_grammar"]) == ([PLAIN], True)


def test_the_grammar_is_that_of_the_place_where_the_answer_begins() -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get"}}}
    assert asked("later", **fields)["grammar"] is None
    found = [asked(place, **fields)["grammar"] for place in ("untold", "open", "closed")]
    assert len(set(found)) == 3 and all(found)
    assert asked("none", response_format={"type": "json_object"})["grammar"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tools": TOOLS * 2},
        {"tools": TOOLS, "tool_choice": "get"},
        {"regex": "("},
        {"regex": "a", "response_format": {"type": "json_object"}},
    ],
)
def test_what_is_refused_has_no_answer(fields: dict[str, Any]) -> None:
    assert asked("none", **fields) is None
