"""Calls and thoughts in /v1/messages: blocks in their order, streamed as they come, and back in as messages."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from tests.helpers.server import MODEL, Frontend, prompt_text
from tests.server.apis.anthropic.test_endpoint import PATH, check_error, create, events, user

TOOL = {"name": "rate", "description": "Rate a city.", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "rate", "arguments": {"rank": 7}}</tool_call>'
SAYS = f"say:<think>Hm, well.</think>Here: {CALL}"


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


def shown(block: Any) -> tuple[str, Any]:
    found = block if isinstance(block, dict) else block.model_dump()
    return found["type"], found.get("text") or found.get("thinking") or found.get("input")


WANTED = [("thinking", "Hm, well."), ("text", "Here:"), ("tool_use", {"rank": 7})]


def test_blocks_keep_their_order(client: anthropic.Anthropic) -> None:
    found = create(client, user(SAYS), tools=[TOOL], tool_choice={"type": "auto"})
    assert [shown(block) for block in found.content] == WANTED and found.stop_reason == "tool_use"


def test_streamed_blocks_equal_complete_ones(client: anthropic.Anthropic, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "messages": [user(SAYS)], "tools": [TOOL]}
    with client.messages.stream(model=MODEL, **asked) as stream:
        final = stream.get_final_message()
    assert [shown(block) for block in final.content] == WANTED and final.stop_reason == "tool_use"
    found = events(http.post(PATH, json={**asked, "stream": True}).text)
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == [kind for kind, _ in WANTED]
    assert starts[-1]["input"] == {} and starts[-1]["id"] and starts[-1]["name"] == "rate"
    pieces = [event["delta"].get("partial_json", "") for event in found if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"rank": 7}'


def test_call_cut_by_the_limit_is_not_called(client: anthropic.Anthropic) -> None:
    found = create(client, user(SAYS), tools=[TOOL], max_tokens=len(SAYS) - len('say: 7}}</tool_call>"'))
    assert found.stop_reason == "max_tokens"
    assert all(block.input == {} for block in found.content if block.type == "tool_use")


def test_a_call_and_its_result_come_back_in(client: anthropic.Anthropic, server: Frontend) -> None:
    first = create(client, user(SAYS), tools=[TOOL])
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rated"}]}
    failed = {**result, "content": "lost", "is_error": True}
    said = {"role": "assistant", "content": first.to_param()["content"]}
    create(client, user("say:x"), said, user([result, failed, {"type": "text", "text": "and now?"}]), tools=[TOOL])
    prompt = prompt_text(server.engine.wait_for_request("and now?"))
    places = [prompt.index(text) for text in ("Here:", '"rank"', "rated", "Error: lost", "and now?")]
    assert places == sorted(places)


def test_the_tool_runner_sends_the_whole_conversation(client: anthropic.Anthropic, server: Frontend) -> None:
    """It asks for a thread of the server first; refused as it understands, every turn has its history and tools."""
    ranks: list[int] = []

    @anthropic.beta_tool
    def rate(rank: int) -> str:
        """Rate a city."""
        ranks.append(rank)
        return "rated by the runner"

    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [user(f"{SAYS} by hand")]}
    runner = client.beta.messages.tool_runner(**asked, tools=[rate], tool_choice={"type": "auto"}, max_iterations=2)
    replies = list(runner)
    prompt = prompt_text(server.engine.wait_for_request("rated by the runner"))
    places = [prompt.index("by hand"), *(prompt.rindex(text) for text in ('"rank"', "by hand", "rated by the runner"))]
    assert places == sorted(places) and "Rate a city." in prompt
    assert ranks[0] == 7 and replies[0].stop_reason == "tool_use" and len(replies) == 2


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
@pytest.mark.parametrize("kind", ["create", "continue"])
def test_a_thread_is_refused(http: httpx.Client, path: str, kind: str) -> None:
    more = {"max_tokens": 9} if path == PATH else {}
    response = http.post(path, json={"messages": [user("say:x")], "thread": {"type": kind}, **more})
    check_error(response, 400, "invalid_request_error")
    details = response.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_invalid_tools_are_named(http: httpx.Client) -> None:
    ask = {"max_tokens": 9, "messages": [user("say:x")], "tools": [TOOL]}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{**TOOL, "name": "no blanks"}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ]
    for change, field in wrong:
        assert check_error(http.post(PATH, json=ask | change), 400, "invalid_request_error").startswith(field)
