"""POST /v1/messages with the official client, against an engine of scripted replies. That client's typed models are the
schema that answers are held against."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from minisgl.server.apis.anthropic.body import AnthropicMessage, ThinkingBlock
from minisgl.server.apis.anthropic.endpoint import _messages
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, MODEL, Frontend, failed_step, frontend, prompt_text

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ASK = {"max_tokens": 100, "messages": [{"role": "user", "content": "say:Hello"}]}


def create(client: anthropic.Anthropic, *messages: Any, **more: Any) -> Message:
    return client.messages.create(**{"model": MODEL, "max_tokens": 100, "messages": [*messages], **more})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    found = ErrorResponse.model_validate_json(response.content)
    assert found.error.type == kind, found
    return found.error.message


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        if event["type"] not in ("ping", "error"):
            EVENTS.validate_python(event, strict=True)
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_a_whole_answer_has_the_exact_shape(http: httpx.Client) -> None:
    body = {"max_tokens": 100, "messages": [user("say:Exactly")]}
    response = http.post(PATH, json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.headers["x-minisgl-max-tokens"] == "100" and response.headers["request-id"]
    Message.model_validate_json(response.content, strict=True)
    found = response.json()
    assert found.pop("id").startswith("msg_")
    usage = found.pop("usage")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("<user>say:Exactly</user>\n<assistant>")
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (8, 0)
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Exactly"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


def test_events_come_in_order(http: httpx.Client) -> None:
    response = http.post(PATH, json={**ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in found[3:-3]) == "Hello"
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 6


def test_stop_reason_names_what_ended_the_message(client: anthropic.Anthropic) -> None:
    cut = create(client, user("say:a longer text"), max_tokens=4)
    assert (cut.content[0].text, cut.stop_reason) == ("a lo", "max_tokens")  # type: ignore[union-attr]
    for stream in (False, True):
        asked: dict[str, Any] = {"stop_sequences": ["zzz", "ng"], "max_tokens": 100}
        if stream:
            with client.messages.stream(model=MODEL, messages=[user("say:a longer text")], **asked) as events_:
                found = events_.get_final_message()
        else:
            found = create(client, user("say:a longer text"), **asked)
        assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("a lo", "stop_sequence", "ng")  # type: ignore[union-attr]


def test_an_empty_answer_has_no_blocks(client: anthropic.Anthropic) -> None:
    found = create(client, user("say:"))
    assert (found.content, found.stop_reason) == ([], "end_turn")


def test_blocks_become_chat_messages(client: anthropic.Anthropic, server: Frontend) -> None:
    create(
        client,
        user([{"type": "text", "text": "blocks", "cache_control": {"type": "ephemeral"}}]),
        {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
        user("say:ok"),
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
    )
    prompt = prompt_text(server.engine.wait_for_request("blocks"))
    assert prompt.startswith(
        "<system>be\nbrief</system>\n<user>blocks</user>\n<assistant>two</assistant>\n<user>say:ok"
    )


@pytest.mark.parametrize("as_blocks", [False, True])
def test_billing_headers_are_not_rendered(client: anthropic.Anthropic, server: Frontend, as_blocks: bool) -> None:
    """It changes with every request: no prefix would be cached."""
    lines = ["x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=fa690;", "be", "x-anthropic: b"]
    asked = f"billed{as_blocks}"
    system: Any = [{"type": "text", "text": line} for line in lines] if as_blocks else "\n".join(lines)
    create(client, user(asked), system=system)
    assert prompt_text(server.engine.wait_for_request(asked)).startswith("<system>be\nx-anthropic: b</system>")
    create(client, user(f"{asked} alone"), system=lines[0])
    assert prompt_text(server.engine.wait_for_request(f"{asked} alone")).startswith("<user>")


def test_assistant_message_at_the_end_is_continued(client: anthropic.Anthropic, server: Frontend) -> None:
    create(client, user("prefill"), {"role": "assistant", "content": "The answer is"})
    assert prompt_text(server.engine.wait_for_request("prefill")).endswith("<assistant>The answer is")


def test_key_is_accepted_in_either_header(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, api_key="sk-right")
    with frontend(front_end=front_end, config=config) as server, server.http() as http:
        for path, body in ((PATH, ASK), (COUNT, {"messages": ASK["messages"]})):
            for head in ({"x-api-key": "sk-right"}, {"Authorization": "Bearer sk-right"}):
                assert http.post(path, json=body, headers=head).status_code == 200
            for head in ({}, {"x-api-key": "sk-wrong"}, {"x-api-key": "sk-right", "Authorization": "Bearer sk-wrong"}):
                check_error(http.post(path, json=body, headers=head), 401, "authentication_error")
        assert http.get("/v1/models", headers={"x-api-key": "sk-right"}).status_code == 200
        good = anthropic.Anthropic(base_url=server.url, api_key="sk-right", max_retries=0)
        assert create(good, user("say:in")).content[0].text == "in"  # type: ignore[union-attr]
        bad = anthropic.Anthropic(base_url=server.url, api_key="sk-wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as error:
            create(bad, user("say:x"))
        assert error.value.type == "authentication_error" and error.value.request_id


CLAUDE_CODE = {
    "max_tokens": 100,
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "system", "content": "be kind"}, user([{"type": "text", "text": "say:Hello"}])],
    "tools": [{"name": "Bash", "description": "Run a command.", "input_schema": {"type": "object", "properties": {}}}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"keep": "all", "type": "clear_thinking_20251015"}]},
    "metadata": {"user_id": "user_1"},
}


@pytest.mark.parametrize("stream", [False, True])
def test_claude_code_s_context_management_is_ignored_and_named(http: httpx.Client, stream: bool) -> None:
    answer = http.post(f"{PATH}?beta=true", json={**CLAUDE_CODE, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-minisgl-ignored"] == (
        "reasoning_effort, system.cache_control, context_management, metadata"
    )
    if stream:
        text = "".join(one["delta"]["text"] for one in events(answer.text) if one["type"] == "content_block_delta")
    else:
        [block] = answer.json()["content"]
        text = block["text"]
    assert text == "Hello"
    answer = http.post(PATH, json={**ASK, "stream": stream, "context_management": None})
    assert answer.status_code == 200 and "x-minisgl-ignored" not in answer.headers


def test_errors_have_their_own_form(http: httpx.Client) -> None:
    check_error(http.post(PATH, json={**ASK, "model": "other"}), 404, "not_found_error")
    check_error(http.get(PATH), 405, "invalid_request_error")
    check_error(http.post(f"{PATH}/other", json={}), 404, "not_found_error")
    check_error(
        http.post(PATH, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error"
    )
    check_error(http.post(PATH, content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
    for stream in (False, True):
        body = {"max_tokens": 9, "messages": [user("fail:")], "stream": stream}
        check_error(http.post(PATH, json=body), 500, "api_error")


def test_a_failure_in_a_stream_is_an_event(http: httpx.Client, server: Frontend) -> None:
    body = {"max_tokens": 99, "messages": [user("hang:breaks")], "stream": True}
    with http.stream("POST", PATH, json=body) as response:
        req_id = server.engine.wait_for_request("hang:breaks").req_id
        text, failed = "", False
        for part in response.iter_text():
            text += part
            if not failed and "content_block_delta" in text:
                failed = True
                server.engine.send(failed_step(req_id, "scripted failure"))
    last = events(text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "scripted failure" in last["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [user([IMAGE])]}, "messages"),
    ({"messages": [user([RESULT])]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [user([CALL])]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages"),
    ({"temperature": 5}, "temperature"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"n": 2}, "n"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"messages": [user("x" * MAX_SEQ_LEN)]}, "prompt is too long"),
]


@pytest.mark.parametrize(("change", "field"), BAD)
def test_invalid_fields_are_named(http: httpx.Client, change: dict[str, Any], field: str) -> None:
    body = {name: value for name, value in {**ASK, **change}.items() if value is not None}
    message = check_error(http.post(PATH, json=body), 400, "invalid_request_error")
    assert message.startswith(field) or field in message.split(":")[0] or f"{field} has" in message, message


class NeverAppended(str):
    """A text that must not be added to another one: that copies all that came before it."""

    __slots__ = ()

    def __radd__(self, before: str) -> str:
        raise AssertionError(f"{self!r} was appended to {len(before)} characters")


def test_many_thinking_blocks_are_joined_once() -> None:
    blocks = [ThinkingBlock.model_construct(type="thinking", thinking=NeverAppended(text)) for text in "abc"]
    [found] = _messages(AnthropicMessage.model_construct(role="assistant", content=blocks))
    assert found["reasoning_content"] == "abc"
