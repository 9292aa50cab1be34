"""What the reference of OpenAI's API shows of responses, as test_openai_chats.py."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.helpers.exact import CALL, CITY, PARAMETERS, City, held, rate
from tests.helpers.server import MODEL

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {"type": "function", "name": "rate", "description": "Rate.", "parameters": PARAMETERS, "strict": True}


def create(client: openai.OpenAI, given: Any = "say:Hello", **more: Any) -> Response:
    """The answer, held against the schema."""
    raw = client.responses.with_raw_response.create(**{"model": MODEL, "input": given, **more})
    held(Response, raw.text)
    found: Response = raw.parse()
    return found


def events(client: openai.OpenAI, given: Any = "say:Hello", **more: Any) -> list[Any]:
    """Those of a stream, each held against the schema, and as the client reads them."""
    asked: dict[str, Any] = {"model": MODEL, "input": given, "stream": True, **more}
    with client.responses.with_streaming_response.create(**asked) as raw:
        lines = [line.removeprefix("data: ") for line in raw.iter_lines() if line.startswith("data: ")]
    found = [held(EVENTS, line) for line in lines]
    assert [one.sequence_number for one in found] == list(range(len(found)))
    with client.responses.create(**asked) as stream:
        seen = [event.type for event in stream]
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys(one.type for one in found))
    return found


# ------------------------------------------------------------------------------------------------------- responses


@pytest.mark.parametrize(
    "given",
    [
        "say:Hello",
        [{"role": "user", "content": "say:Hello"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say:Hello"}]}],
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "say:Hello"}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "say:Hello"},
        ],
    ],
    ids=["text", "message", "parts", "developer", "talk"],
)
def test_inputs_of_every_form_are_answered(client: openai.OpenAI, given: Any) -> None:
    found = create(client, given)
    assert (found.output_text, found.status, found.error) == ("Hello", "completed", None)
    assert found.usage is not None and found.usage.output_tokens == 6
    [item] = found.output
    assert item.type == "message" and item.content[0].type == "output_text" and item.status == "completed"


TAKEN: list[dict[str, Any]] = [
    {"instructions": "Be brief."},
    {"temperature": 0.5},
    {"top_p": 0.5},
    {"metadata": {"a": "b"}},
    {"user": "me"},
    {"safety_identifier": "x"},
    {"prompt_cache_key": "x"},
    {"service_tier": "auto"},
    {"store": False},
    {"truncation": "auto"},
    {"truncation": "disabled"},
    {"parallel_tool_calls": False},
    {"max_output_tokens": 50},
    {"max_tool_calls": 3},
    {"background": False},
    {"reasoning": {"effort": "none"}},
    {"text": {"format": {"type": "text"}}},
    {"text": {"verbosity": "medium"}},
    {"text": {"verbosity": "low"}},
    {"tools": [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]},
    {"tools": [{"type": "custom", "name": "x", "format": {"type": "text"}}]},
    {"tools": [{"type": "namespace", "name": "n", "description": "x", "tools": [{"type": "function", "name": "f"}]}]},
    {"include": ["reasoning.encrypted_content"]},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"stream_options": {"include_obfuscation": False}},
]


@pytest.mark.parametrize("more", TAKEN, ids=",".join)
def test_response_arguments_are_accepted(client: openai.OpenAI, more: dict[str, Any]) -> None:
    found = create(client, **more)
    assert found.output_text == "Hello"
    for name in ("instructions", "temperature", "top_p", "metadata", "user", "safety_identifier", "truncation"):
        assert name not in more or getattr(found, name) == more[name]
    last = events(client, **more)[-1]
    assert last.type == "response.completed" and last.response.output_text == "Hello"


NOT_DONE: list[tuple[str, dict[str, Any]]] = [
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("tools", {"tools": [{"type": "local_shell"}]}),
    ("input", {"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]}),
    ("input", {"given": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}),
    ("previous_response_id", {"previous_response_id": "resp_none"}),
]


@pytest.mark.refused
@pytest.mark.parametrize(("field", "more"), NOT_DONE)
def test_unsupported_arguments_are_named(client: openai.OpenAI, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        create(client, **more)
    assert (error.value.param or "").split(".")[0] == field and field in error.value.message


def test_the_events_of_a_text_come_in_order(client: openai.OpenAI) -> None:
    found = events(client)
    kinds = list(dict.fromkeys(one.type for one in found))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(one.delta for one in found if one.type == "response.output_text.delta") == "Hello"


def test_a_response_has_log_probabilities(client: openai.OpenAI) -> None:
    [item] = create(client, include=["message.output_text.logprobs"], top_logprobs=1).output
    assert item.type == "message" and item.content[0].type == "output_text" and item.content[0].logprobs


def test_max_output_tokens_makes_a_response_incomplete(client: openai.OpenAI) -> None:
    found = create(client, max_output_tokens=3)
    assert (found.output_text, found.status) == ("Hel", "incomplete")
    assert getattr(found.output[0], "status", None) == "incomplete"
    assert found.incomplete_details is not None and found.incomplete_details.reason == "max_output_tokens"
    assert events(client, max_output_tokens=3)[-1].type == "response.incomplete"


def test_reasoning_is_an_item_of_the_response(client: openai.OpenAI) -> None:
    found = create(client, "say:<think>Hm.</think>Yes")
    assert [item.type for item in found.output] == ["reasoning", "message"] and found.output_text == "Yes"
    assert found.usage is not None and found.usage.output_tokens_details.reasoning_tokens > 0
    kinds = {one.type for one in events(client, "say:<think>Hm.</think>Yes")}
    assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds


CHOICES: list[Any] = [
    "auto",
    "required",
    {"type": "function", "name": "rate"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "rate"}]},
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_tool_call_is_an_item_of_the_response(client: openai.OpenAI, choice: Any) -> None:
    [call] = create(client, f"say:{CALL}", tools=[TOOL], tool_choice=choice).output
    assert call.type == "function_call" and (call.name, call.arguments) == ("rate", '{"rank": 7}')
    found = events(client, f"say:{CALL}", tools=[TOOL], tool_choice=choice)
    deltas = [one.delta for one in found if one.type == "response.function_call_arguments.delta"]
    [done] = [one for one in found if one.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done.arguments == '{"rank": 7}'


def test_a_tool_result_is_answered(client: openai.OpenAI) -> None:
    first = create(client, f"say:{CALL}", tools=[TOOL])
    [call] = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "say:seven"}
    assert create(client, [result], previous_response_id=first.id, tools=[TOOL]).output_text == "seven"
    talk: list[Any] = [{"role": "user", "content": f"say:{CALL}"}, call.model_dump(exclude_none=True), result]
    assert create(client, talk, tools=[TOOL]).output_text == "seven"


def test_parse_returns_the_model_class_of_a_response(client: openai.OpenAI) -> None:
    found = client.responses.parse(model=MODEL, input=f"say:{CITY}", text_format=City)
    assert found.output_parsed == City(name="Paris", rank=1)
    tools = [openai.pydantic_function_tool(rate)]
    [call] = client.responses.parse(model=MODEL, input=f"say:{CALL}", tools=[_flat(one) for one in tools]).output
    assert call.type == "function_call" and json.loads(call.arguments) == {"rank": 7}


def _flat(tool: Any) -> Any:
    return {"type": "function", **tool["function"]}


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_text_format_gives_matching_json(client: openai.OpenAI, kind: str) -> None:
    form: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        form |= {"name": "city", "strict": True, "schema": City.model_json_schema()}
    found = create(client, f"say:{CITY}", text={"format": form})
    assert json.loads(found.output_text)["name"] == "Paris" and found.text is not None
    assert found.text.format is not None and found.text.format.type == kind


def test_the_stream_helper_of_responses(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=f"say:{CITY}", text_format=City) as stream:
        [done] = [event for event in stream if event.type == "response.output_text.done"]
        assert done.parsed == stream.get_final_response().output_parsed == City(name="Paris", rank=1)


def test_stored_responses_are_retrieved_paged_and_deleted(client: openai.OpenAI) -> None:
    first = create(client)
    second = create(client, "say:again", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    found = client.responses.with_raw_response.retrieve(second.id)
    assert held(Response, found.text) == second
    assert [item.type for item in client.responses.input_items.list(second.id, order="asc")] == ["message"] * 3
    page = client.responses.input_items.list(second.id, limit=2)
    assert len(page.data) == 2 and page.has_more
    assert len(list(client.responses.input_items.list(second.id, limit=1))) == 3  # by pages
    client.responses.delete(second.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(second.id)


def test_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="say:Hello", instructions="Be brief.")
    usage = create(client, instructions="Be brief.").usage
    assert usage is not None and counted.input_tokens == usage.input_tokens
    assert counted.object == "response.input_tokens"


@pytest.mark.refused
def test_background_calls_are_refused(client: openai.OpenAI) -> None:
    found = create(client)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(found.id)
    with pytest.raises(openai.BadRequestError), client.responses.retrieve(found.id, stream=True) as stream:
        list(stream)
    with pytest.raises(openai.APIStatusError) as error:
        client.responses.compact(model=MODEL, input="x")
    assert error.value.status_code in (404, 405)
