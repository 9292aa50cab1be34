"""The official `openai` package with the small model: its helpers for chats and for responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

PARIS: list[Any] = [{"role": "user", "content": "Tell me about Paris."}]
ASK: dict[str, Any] = {"model": "smollm2", "temperature": 0}


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]
    rank: int = Field(ge=0, le=99)


class rate(BaseModel):
    """Rate a city."""

    rank: int = Field(ge=0, le=99)


RATE = openai.pydantic_function_tool(rate)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_chats_are_parsed(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(**ASK, messages=PARIS, max_tokens=200, response_format=City)
    message = found.choices[0].message
    assert isinstance(message.parsed, City) and message.refusal is None
    with client.chat.completions.stream(**ASK, messages=PARIS, max_tokens=200, response_format=City) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == message.parsed and {"chunk", "content.delta", "content.done"} <= kinds


def test_a_cut_chat_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ASK, messages=PARIS, max_tokens=3, response_format=City)


def test_tools_of_chats_are_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "messages": PARIS, "max_tokens": 200, "tools": [RATE], "tool_choice": "required"}
    choice = client.chat.completions.parse(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert all(isinstance(call.function.parsed_arguments, rate) for call in choice.message.tool_calls)
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert [event.parsed_arguments for event in done] == [
        call.function.parsed_arguments for call in choice.message.tool_calls
    ]
    assert final is not None and [event.arguments for event in done] == [call.function.arguments for call in final]


def test_a_tool_is_called_and_answered(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "rate"}}
    asked: dict[str, Any] = {**ASK, "max_tokens": 100, "tools": [RATE]}
    first = client.chat.completions.create(**asked, messages=PARIS, tool_choice=named).choices[0]
    assert first.finish_reason == "stop" and first.message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rated"} for call in first.message.tool_calls]
    talk = [*PARIS, first.message, *results]
    second = client.chat.completions.create(**asked, messages=talk, tool_choice="none").choices[0]
    assert second.message.content and not second.message.tool_calls


def test_responses_are_parsed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASK, "input": "Tell me about Paris.", "max_output_tokens": 200}
    found = client.responses.parse(**asked, text_format=City)
    assert isinstance(found.output_parsed, City)
    with client.responses.stream(**asked, text_format=City) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert final.output_parsed == found.output_parsed
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


def test_a_tool_of_responses_is_called_and_answered(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "rate", "parameters": rate.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {**ASK, "tools": [tool], "max_output_tokens": 100}
    first = client.responses.create(**asked, input="Tell me about Paris.", tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and all(rate.model_validate_json(call.arguments) for call in calls)
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rated"} for call in calls]
    second = client.responses.create(**asked, input=results, previous_response_id=first.id, tool_choice="none")
    assert second.output_text
    with client.responses.stream(**asked, input="Tell me about Paris.", tool_choice="required") as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert "".join(deltas) == "".join(call.arguments for call in final) == "".join(call.arguments for call in calls)


def test_a_conversation_of_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, input="What is the capital of France?", max_output_tokens=30)
    assert "Paris" in first.output_text
    second = client.responses.create(**ASK, input="Repeat it.", previous_response_id=first.id, max_output_tokens=30)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items] == ["message"] * 3
