"""What Anthropic's documentation shows of messages, with its official package: a check for each call, each argument.
What the model says is scripted, so answers are exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.helpers.exact import CALL, CITY, PARAMETERS, City, held
from tests.helpers.server import MODEL, Frontend

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOL: Any = {"name": "rate", "description": "Rate.", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def claude(scripted: Frontend) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as one:
        yield one


def asked(text: str = "say:Hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}


def create(claude: anthropic.Anthropic, text: str = "say:Hello", **more: Any) -> Message:
    """The answer, held against the client's types."""
    raw = claude.messages.with_raw_response.create(**asked(text, **more))
    held(Message, raw.http_response.content)
    found: Message = raw.parse()
    return found


def events(claude: anthropic.Anthropic, text: str = "say:Hello", **more: Any) -> list[Any]:
    with claude.messages.with_streaming_response.create(**asked(text, **more), stream=True) as raw:
        lines = [line.removeprefix("data: ") for line in raw.iter_lines() if line.startswith("data: ")]
    return [held(EVENTS, line) for line in lines if json.loads(line)["type"] != "ping"]


def text_of(found: Message) -> str:
    [block] = found.content
    assert block.type == "text"
    return block.text


def test_a_text_message_has_role_stop_reason_and_usage(claude: anthropic.Anthropic) -> None:
    found = create(claude, "say:Bonjour, 🙂!")
    assert (text_of(found), found.role, found.type) == ("Bonjour, 🙂!", "assistant", "message")
    assert (found.stop_reason, found.stop_sequence, found.model) == ("end_turn", None, MODEL)
    assert found.id.startswith("msg_") and found.usage.output_tokens == len("Bonjour, 🙂!".encode()) + 1


TAKEN: list[dict[str, Any]] = [
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    {"metadata": {"user_id": "me"}},
    {"service_tier": "auto"},
    {"stop_sequences": ["none of it"]},
    {"thinking": {"type": "disabled"}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": {"type": "auto"}},
    {"tools": [TOOL], "tool_choice": {"type": "none"}},
    {"extra_body": {"temperature": 0.5, "top_p": 0.5, "top_k": 5}},
    {"extra_headers": {"anthropic-beta": "token-efficient-tools-2025-02-19"}},
    {"timeout": 60.0},
]


@pytest.mark.parametrize("more", TAKEN, ids=",".join)
def test_arguments_are_accepted_also_in_a_stream(claude: anthropic.Anthropic, more: dict[str, Any]) -> None:
    assert text_of(create(claude, **more)) == "Hello"
    deltas = [one.delta for one in events(claude, **more) if one.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas) == "Hello"


def test_a_conversation_with_content_parts_is_answered(claude: anthropic.Anthropic) -> None:
    parts: Any = [{"type": "text", "text": "Please"}, {"type": "text", "text": "say:yes"}]
    before: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    found = create(claude, messages=[*before, {"role": "user", "content": parts}])
    assert text_of(found) == "yes"


NOT_DONE: list[tuple[str, dict[str, Any]]] = [
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]},
    ),
    ("tools", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
]


@pytest.mark.refused
@pytest.mark.parametrize(("field", "more"), NOT_DONE)
def test_unsupported_arguments_are_named(claude: anthropic.Anthropic, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError, match=field) as error:
        create(claude, **more)
    assert error.value.type == "invalid_request_error"


def test_the_events_of_a_text_come_in_order(claude: anthropic.Anthropic) -> None:
    found = events(claude)
    kinds = list(dict.fromkeys(one.type for one in found))
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
        "message_stop",
    ]
    [last] = [one for one in found if one.type == "message_delta"]
    assert last.delta.stop_reason == "end_turn" and last.usage.output_tokens == 6


def test_the_stream_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == "Hello" == stream.get_final_text()
    with claude.messages.stream(**asked(f"say:{CALL}"), tools=[TOOL]) as stream:
        [done] = [event for event in stream if event.type == "content_block_stop"]
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and done.content_block == final.content[0]


CHOICES: list[Any] = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "rate"}]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("alone", [False, True])
def test_a_tool_call_is_parsed_also_in_a_stream(claude: anthropic.Anthropic, choice: Any, alone: bool) -> None:
    choice = {**choice, "disable_parallel_tool_use": alone}
    found = create(claude, f"say:{CALL}", tools=[TOOL], tool_choice=choice)
    [block] = found.content
    assert block.type == "tool_use" and (block.name, block.input) == ("rate", {"rank": 7}) and block.id
    assert found.stop_reason == "tool_use"
    seen = events(claude, f"say:{CALL}", tools=[TOOL], tool_choice=choice)
    deltas = [one.delta for one in seen if one.type == "content_block_delta"]
    assert json.loads("".join(delta.partial_json for delta in deltas)) == {"rank": 7}


def test_a_tool_result_is_answered(claude: anthropic.Anthropic) -> None:
    first = create(claude, f"say:{CALL}", tools=[TOOL])
    [call] = first.content
    assert call.type == "tool_use"
    for content in ("say:seven", [{"type": "text", "text": "say:seven"}]):
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        talk: list[Any] = [
            {"role": "user", "content": f"say:{CALL}"},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        assert text_of(create(claude, messages=talk, tools=[TOOL])) == "seven"


def test_the_tool_runner_completes(claude: anthropic.Anthropic) -> None:
    rated = []

    @beta_tool
    def rate(rank: int) -> str:
        """Rate.

        Args:
            rank: The rank.
        """
        rated.append(rank)
        return "say:done"

    final = claude.beta.messages.tool_runner(**asked(f"say:{CALL}"), tools=[rate]).until_done()
    assert rated == [7] and final.content[0].type == "text" and final.content[0].text == "done"


def test_an_answer_is_parsed(claude: anthropic.Anthropic) -> None:
    assert claude.messages.parse(**asked(f"say:{CITY}"), output_format=City).parsed_output == City(name="Paris", rank=1)
    form: Any = {
        "format": {"type": "json_schema", "schema": {**City.model_json_schema(), "additionalProperties": False}}
    }
    assert json.loads(text_of(create(claude, f"say:{CITY}", output_config=form)))["name"] == "Paris"


def test_thoughts(claude: anthropic.Anthropic) -> None:
    found = create(claude, "say:<think>Hm.</think>Yes")
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].type == "thinking" and found.content[0].thinking == "Hm."
    kinds = [one.delta.type for one in events(claude, "say:<think>Hm.</think>Yes") if one.type == "content_block_delta"]
    assert kinds[0] == "thinking_delta" and kinds[-1] == "text_delta"
    again: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": "say:on"},
    ]
    assert text_of(create(claude, messages=again)) == "on"


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    body = asked(system="Be brief.", tools=[TOOL])
    del body["max_tokens"]
    usage = create(claude, system="Be brief.", tools=[TOOL]).usage
    counted = claude.messages.count_tokens(**body).input_tokens
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert claude.beta.messages.count_tokens(**body).input_tokens == counted


def test_models_are_listed_and_found_by_id(claude: anthropic.Anthropic) -> None:
    assert [one.id for one in claude.models.list()] == [MODEL] and claude.models.retrieve(MODEL).id == MODEL


def test_the_beta_client(claude: anthropic.Anthropic) -> None:
    found = claude.beta.messages.create(**asked(), betas=["context-1m-2025-08-07"])
    assert found.content[0].type == "text" and found.content[0].text == "Hello"
    with claude.beta.messages.stream(**asked()) as stream:
        assert stream.get_final_text() == "Hello"


@pytest.mark.refused
def test_other_routes_are_not_there(claude: anthropic.Anthropic) -> None:
    for call in (claude.messages.batches.list, claude.beta.files.list):
        with pytest.raises(anthropic.APIStatusError) as error:
            call()
        assert error.value.status_code in (404, 501)  # files are kept where the server has a folder for them


def test_errors(claude: anthropic.Anthropic, scripted: Frontend) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(claude, model="other")
    assert missing.value.type == "not_found_error" and missing.value.request_id
    for field, more in (("max_tokens", {"max_tokens": -1}), ("messages", {"messages": []})):
        with pytest.raises(anthropic.BadRequestError, match=field):
            create(claude, **more)  # type: ignore[arg-type]
    with pytest.raises(anthropic.InternalServerError):
        create(claude, "fail:")
    with pytest.raises(anthropic.APIStatusError), claude.messages.stream(**asked("fail:abc")) as stream:
        stream.get_final_message()
    with pytest.raises(anthropic.APITimeoutError):
        create(claude, "hang:x", timeout=0.2)
    scripted.wait_until(lambda: scripted.num_live == 0)
