"""Calls and thoughts in /v1/responses: items in their order, streamed as they come, and back in as messages."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.helpers.server import Frontend, check_error, prompt_text
from tests.server.apis.responses.test_endpoint import PATH, events, post

TOOL = {
    "type": "function",
    "name": "rate",
    "description": "Rate a city.",
    "parameters": {"type": "object", "properties": {"rank": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "rate", "arguments": {"rank": 7}}</tool_call>'
SAYS = f"say:<think>Hm, well.</think>Here: {CALL}\n{CALL} done"


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"input": text, "tools": [TOOL], **more}


def shown(item: dict[str, Any]) -> tuple[str, str]:
    if item["type"] == "function_call":
        return item["name"], item["arguments"]
    return item["type"], item["content"][0]["text"]


def test_items_come_in_their_order(http: httpx.Client) -> None:
    body = post(http, **ask(SAYS))
    call = ("rate", '{"rank": 7}')
    assert [shown(item) for item in body["output"]] == [
        ("reasoning", "Hm, well."),
        ("message", "Here:"),
        call,
        call,
        ("message", " done"),
    ]
    ids = [item["call_id"] for item in body["output"] if item["type"] == "function_call"]
    assert len(set(ids)) == 2 and all(ids)
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert body["tools"] == [TOOL] and body["tool_choice"] == "auto"


def test_events_of_each_kind(http: httpx.Client) -> None:
    found = events(http.post(PATH, json=ask(SAYS, stream=True)).text)
    last = found[-1]["response"]
    assert last["status"] == "completed"
    deltas: dict[str, str] = {}
    for event in found:
        if "delta" in event:
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert deltas == {item["id"]: shown(item)[1] for item in last["output"]}
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 5
    assert kinds.count("function_call_arguments.done") == 2 and kinds.count("reasoning_text.done") == 1
    begun = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in begun] == [item["id"] for item in last["output"]]
    assert all(item["arguments"] == "" for item in begun if item["type"] == "function_call")


def test_a_call_and_its_result_come_back_in(http: httpx.Client, server: Frontend) -> None:
    first = post(http, **ask(f"say:<think>So.</think>Yes. {CALL}"))
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rated it"}
    post(http, **ask("", input=[result], previous_response_id=first["id"]))
    kept = prompt_text(server.engine.wait_for_request("rated it"))
    alone = [{"role": "user", "content": "say:x"}, *first["output"], {**result, "output": "rated it, too"}]
    post(http, input=alone, tools=[TOOL])
    sent = prompt_text(server.engine.wait_for_request("rated it, too"))
    for prompt in (kept, sent):
        assert prompt.index("Yes.") < prompt.index('"rank": 7') < prompt.index("rated it")


def test_invalid_tools_are_named(http: httpx.Client) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{**TOOL, "name": "no blanks"}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "o"}]}}, ""),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ]
    for change, param in wrong:
        error = check_error(http.post(PATH, json=ask("say:x", **change)), 400)
        assert error["param"] == (param or "tool_choice.tools"), error


def test_only_allowed_tools_are_shown(http: httpx.Client, server: Frontend) -> None:
    other = {**TOOL, "name": "forget"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "rate"}]}
    post(http, input="allowed say:ok", tools=[TOOL, other], tool_choice=choice)
    prompt = prompt_text(server.engine.wait_for_request("allowed say:ok"))
    assert '"rate"' in prompt and '"forget"' not in prompt


def test_tool_choice_auto_without_tools_is_accepted(http: httpx.Client) -> None:
    assert post(http, input="say:ok", tools=[], tool_choice="auto")["output"][0]["content"][0]["text"] == "ok"


def test_a_result_may_have_parts(http: httpx.Client, server: Frontend) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "rate", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "parts of "}, {"type": "refusal", "refusal": "a result"}]
    result = {"type": "function_call_output", "call_id": "c", "output": parts}
    post(http, input=[call, result, {"role": "user", "content": "say:ok"}], tools=[TOOL])
    assert "parts of a result" in prompt_text(server.engine.wait_for_request("parts of a result"))
