"""Calls whose arguments are no JSON, through every chat API, whole and streamed: they are mended, or the answer calls
no tools and nobody sees empty arguments. Stop strings end content alone."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.server import Frontend, chat_body, events

SCHEMA = {"type": "object", "properties": {"body": {"type": "string"}, "size": {"type": "integer"}}}
MENDED = {
    '{"body": "one\ntwo"}': {"body": "one\ntwo"},
    '{"body": "blue",}': {"body": "blue"},
    '{"body": None}': {"body": None},
    '{body: "blue", "size": 007}': {"body": "blue", "size": 7},
    '{"body": "say "hi" now"}': {"body": 'say "hi" now'},
    '{"body": "hello STOP now"}': {"body": "hello STOP now"},
    "{{'size': 2}}": {"size": 2},
}
BROKEN = ['{"body": "blue', '{"body": blue "x" y}', '{"body": "blue"}, "size": 2']
STOP = "STOP"


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


def said(arguments: str) -> str:
    return f'say:<tool_call>\n{{"name": "save", "arguments": {arguments}}}\n</tool_call>'


def chat(http: httpx.Client, text: str, stream: bool) -> tuple[str, list[Any]]:
    """The reason and the arguments of the calls, as text."""
    tool = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
    body = chat_body(text, tools=[tool], stream=stream, stop=[STOP])
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        [choice] = response.json()["choices"]
        calls = choice["message"].get("tool_calls", ())
        return choice["finish_reason"], [call["function"]["arguments"] for call in calls]
    found: list[str] = []
    reason = ""
    for event in events(response.text):
        if event == "[DONE]":
            break
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(found):
                    found.append("")
                found[call["index"]] += call["function"]["arguments"]
    return reason, found


def messages(http: httpx.Client, text: str) -> tuple[str, list[Any]]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 500,
        "tools": [{"name": "save", "input_schema": SCHEMA}],
        "stop_sequences": [STOP],
    }
    found = http.post("/v1/messages", json=body).json()
    return found["stop_reason"], [one["input"] for one in found["content"] if one["type"] == "tool_use"]


def ollama(http: httpx.Client, text: str, stream: bool) -> list[Any]:
    tool = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": text}], "tools": [tool], "stream": stream}
    response = http.post("/api/chat", json=body | {"options": {"stop": [STOP], "temperature": 0}})
    answers = [json.loads(line) for line in response.text.splitlines()]
    calls = [call for one in answers for call in one["message"].get("tool_calls", ())]
    return [call["function"]["arguments"] for call in calls]


def responses(http: httpx.Client, text: str) -> list[Any]:
    tool = {"type": "function", "name": "save", "parameters": SCHEMA}
    found = http.post("/v1/responses", json={"input": text, "tools": [tool], "temperature": 0}).json()
    return [json.loads(one["arguments"]) for one in found["output"] if one["type"] == "function_call"]


@pytest.mark.parametrize("arguments", MENDED)
def test_arguments_of_calls_are_mended_in_every_api(http: httpx.Client, arguments: str) -> None:
    meant, text = MENDED[arguments], said(arguments)
    for stream in (False, True):
        reason, [found] = chat(http, text, stream)
        assert reason == "tool_calls" and json.loads(found) == meant
        assert ollama(http, text, stream) == [meant]
    assert messages(http, text) == ("tool_use", [meant])
    assert responses(http, text) == [meant]


@pytest.mark.parametrize("arguments", BROKEN)
def test_broken_arguments_are_no_call_in_any_api(http: httpx.Client, arguments: str) -> None:
    text = said(arguments)
    assert chat(http, text, False) == ("stop", [])
    assert chat(http, text, True)[0] == "stop"
    assert messages(http, text) == ("end_turn", [])
    assert ollama(http, text, False) == ollama(http, text, True) == []
    assert responses(http, text) == []


@pytest.mark.parametrize("arguments", BROKEN)
def test_an_answer_whose_second_call_is_broken_calls_the_first(http: httpx.Client, arguments: str) -> None:
    """A stream has shown pieces of the second, and ends as a text does."""
    text = said('{"size": 1}') + said(arguments).removeprefix("say:")
    assert chat(http, text, False) == ("tool_calls", ['{"size": 1}'])
    assert chat(http, text, True)[0] == "stop"
    assert messages(http, text) == ("tool_use", [{"size": 1}])
    assert ollama(http, text, False) == ollama(http, text, True) == responses(http, text) == [{"size": 1}]


def test_a_call_that_a_limit_cuts_is_no_call_with_empty_arguments(http: httpx.Client) -> None:
    text = said('{"body": "' + "blue " * 40 + '"}')
    tool = {"type": "function", "function": {"name": "save", "parameters": SCHEMA}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "tools": [tool], "stream": False}
    found = http.post("/api/chat", json=body | {"options": {"num_predict": 90}}).json()
    assert found["done_reason"] == "length" and not found["message"].get("tool_calls")
    [choice] = http.post("/v1/chat/completions", json=chat_body(text, tools=[tool], max_tokens=90)).json()["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"].get("tool_calls")
