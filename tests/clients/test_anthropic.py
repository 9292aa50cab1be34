"""The official `anthropic` package with the small model: messages, its streaming helper, tools."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel, Field

PARIS: list[Any] = [{"role": "user", "content": "Tell me about Paris."}]
GREEDY = {"temperature": 0}  # newer clients know no such field
ASK: dict[str, Any] = {"model": "smollm2", "extra_body": GREEDY, "max_tokens": 200, "messages": PARIS}
RANK = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"rank": RANK}, "required": ["rank"], "additionalProperties": False}
RATE: Any = {"name": "rate", "description": "Rate a city.", "input_schema": SCHEMA}


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def test_a_message_streamed_is_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"]
    assert text == whole.content[0].text == final.content[0].text and text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    counted = client.messages.count_tokens(model="smollm2", messages=PARIS).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_tool_is_called_and_answered(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**ASK, tools=[RATE], tool_choice={"type": "any"})
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and calls
    assert all(isinstance(call.input["rank"], int) and 0 <= call.input["rank"] <= 99 for call in calls)
    with client.messages.stream(**ASK, tools=[RATE], tool_choice={"type": "any"}) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert [call.input for call in streamed] == [call.input for call in calls]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rated"} for call in calls]
    talk = [*PARIS, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(**{**ASK, "messages": talk}, tools=[RATE], tool_choice={"type": "none"})
    assert second.stop_reason in ("end_turn", "max_tokens") and second.content[0].type == "text"


def test_a_named_tool_is_called(client: anthropic.Anthropic) -> None:
    other: Any = {**RATE, "name": "forget"}
    choice: Any = {"type": "tool", "name": "forget", "disable_parallel_tool_use": True}
    found = client.messages.create(**ASK, tools=[RATE, other], tool_choice=choice)
    assert [block.name for block in found.content if block.type == "tool_use"] == ["forget"]
    assert found.stop_reason == "tool_use"


def test_an_answer_is_parsed(client: anthropic.Anthropic) -> None:
    found = client.messages.parse(**ASK, output_format=City)
    assert isinstance(found.parsed_output, City)
