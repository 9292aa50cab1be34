"""Tools of /v1/responses as agents send them: what the model is told, what its calls become, and what of a history it
is shown."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from minisgl.server.apis.responses.tools import custom_input, flat_name
from tests.helpers.server import Frontend, check_error, prompt_text
from tests.server.apis.responses.test_endpoint import PATH, create, events, post

PATCH = '*** Begin Patch\n+"é"\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
RUN = {"type": "function", "name": "run", "description": "Runs it.", "parameters": {"type": "object"}, "strict": False}
NAMESPACE = {"type": "namespace", "name": "mcp__box__", "description": "A box.", "tools": [RUN, {**RUN, "name": "end"}]}
AGENT = [RUN, {"type": "web_search", "external_web_access": True}, CUSTOM, NAMESPACE, {"type": "tool_search"}]
USER = {"role": "user", "content": "say:done"}


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


def called(name: str, arguments: str) -> str:
    return f'say:<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tools_that_only_openai_runs_are_left_out(
    http: httpx.Client, server: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl.server"):
        answer = http.post(PATH, json={"input": "left out say:ok", "tools": AGENT, "reasoning": {"effort": "high"}})
    assert answer.status_code == 200, answer.text
    ignored = "reasoning_effort, tools.web_search, tools.tool_search"
    assert answer.headers["x-minisgl-ignored"] == ignored
    assert any("tools.web_search, tools.tool_search" in record.getMessage() for record in caplog.records)
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function", "custom", "namespace"]
    prompt = prompt_text(server.engine.wait_for_request("left out say:ok"))
    for shown in ('"run"', '"apply_patch"', '"mcp__box__run"', '"mcp__box__end"', "A box.", "start: /.+/s"):
        assert shown in prompt
    assert "web_search" not in prompt and prompt.count("A box.") == 1


def test_hosted_tools_alone_leave_no_tools(http: httpx.Client) -> None:
    assert post(http, input="say:ok", tools=[{"type": "web_search"}], tool_choice="auto")["tools"] == []
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "run"}],
    }
    assert post(http, input="say:ok", tools=AGENT, tool_choice=choice)["output"][0]["type"] == "message"


def test_a_call_in_a_namespace_comes_back_with_it(http: httpx.Client, server: Frontend) -> None:
    first = post(http, input=called("mcp__box__end", '{"a": 1}'), tools=AGENT)
    [call] = first["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__box__", "end")
    assert call["arguments"] == '{"a": 1}'
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "boxed"}
    post(http, input=[result], previous_response_id=first["id"], tools=AGENT)
    kept = prompt_text(server.engine.wait_for_request("boxed"))
    post(http, input=[USER, call, {**result, "output": "boxed again"}], tools=AGENT)
    sent = prompt_text(server.engine.wait_for_request("boxed again"))
    assert all('"name": "mcp__box__end"' in prompt.split("</user>")[1] for prompt in (kept, sent))


def test_a_custom_call_has_its_text(client: openai.OpenAI, http: httpx.Client, server: Frontend) -> None:
    arguments = json.dumps({"input": PATCH})
    body = {"input": called("apply_patch", arguments), "tools": AGENT}
    first = post(http, **body)
    [call] = first["output"]
    assert call == {**call, "type": "custom_tool_call", "name": "apply_patch", "input": PATCH} and "status" not in call
    found = events(http.post(PATH, json={**body, "stream": True}).text)
    kinds = [event["type"].removeprefix("response.") for event in found]
    kind = "custom_tool_call_input"
    assert kinds[2:] == ["output_item.added", f"{kind}.delta", f"{kind}.done", "output_item.done", "completed"]
    assert found[2]["item"]["input"] == "" and found[3]["delta"] == found[4]["input"] == PATCH
    assert found[-1]["response"]["output"] == [found[5]["item"]]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched it"}
    again = create(client, [result], previous_response_id=first["id"], tools=AGENT)
    prompt = prompt_text(server.engine.wait_for_request("patched it"))
    assert "Begin Patch" in prompt.split("</user>")[1] and prompt.index("Begin Patch") < prompt.index("patched it")
    kept = client.responses.input_items.list(again.id).data
    assert {item.type for item in kept} == {"message", "custom_tool_call", "custom_tool_call_output"}


def test_a_call_may_be_asked_for_by_its_own_name(http: httpx.Client, server: Frontend) -> None:
    for i, (choice, name) in enumerate(
        [
            ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
            ({"type": "function", "name": "end", "namespace": "mcp__box__"}, "mcp__box__end"),
        ]
    ):
        post(http, input=f"chosen {i} {called(name, '{}')}", tools=AGENT, tool_choice=choice)
        request = server.engine.wait_for_request(f"chosen {i}")
        assert request.sampling.grammar is not None and name in request.sampling.grammar


def test_a_history_of_an_agent_is_shown(http: httpx.Client, server: Frontend) -> None:
    history: list[dict[str, Any]] = [
        {"type": "compaction", "id": "c", "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec", "command": ["ls", "-l"], "env": {}}},
        {"type": "local_shell_call_output", "id": "s", "output": "two files"},
        {"type": "custom_tool_call", "call_id": "p", "name": "apply_patch", "input": "one line"},
        {"type": "custom_tool_call_output", "call_id": "p", "output": [{"type": "input_text", "text": "patched"}]},
        {"role": "user", "content": "a history say:ok"},
    ]
    answer = http.post(PATH, json={"input": history, "tools": AGENT})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-minisgl-ignored"].startswith("input.compaction, input.web_search_call, ")
    prompt = prompt_text(server.engine.wait_for_request("a history say:ok"))
    places = [prompt.index(text) for text in ('"-l"', "two files", "one line", "patched", "a history")]
    assert places == sorted(places) and "gAAA" not in prompt
    items = http.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in items] == [*(item["type"] for item in history[:-1]), "message"]
    assert items[0]["encrypted_content"] == "gAAA" and items[2]["action"]["command"] == ["ls", "-l"]


def test_invalid_tools_are_named_by_their_place(http: httpx.Client) -> None:
    search = {"type": "web_search"}
    wrong: list[tuple[list[dict[str, Any]], str]] = [
        ([search, {**RUN, "name": "a b"}], "tools.1.name"),
        ([search, {**NAMESPACE, "tools": [RUN, {**CUSTOM, "name": "a b"}]}], "tools.1.tools.1.name"),
        ([NAMESPACE, search, {**RUN, "name": "mcp__box__run"}], "tools.2.name"),
        ([{**NAMESPACE, "tools": [search]}], "tools.0.tools.0.type"),
        ([{"type": "local_shell"}], "tools.0.type"),
        ([{"type": "custom"}], "tools.0.name"),
    ]
    for tools, param in wrong:
        assert check_error(http.post(PATH, json={"input": "say:x", "tools": tools}), 400)["param"] == param


def test_names_are_flattened_and_inputs_unwrapped() -> None:
    assert flat_name("a", None) == "a" and flat_name("_a", "mcp__b__") == "mcp__b__a"
    assert custom_input('{"input": "a\\nb"}') == "a\nb" and custom_input('{"input": "a\\nb') == "a\nb"
    assert custom_input('{"patch": 1}') == "" and custom_input('{"input": 5}') == '{"input": 5}'
    assert custom_input("no JSON") == "no JSON" and custom_input("") == ""
