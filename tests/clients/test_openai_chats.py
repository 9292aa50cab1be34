"""What the reference of OpenAI's API shows of chats, with its official package: a check for each call,
each argument. What the model says is scripted, so answers are exact; each keeps to the published schema."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.helpers.exact import CALL, CITY, PARAMETERS, City, held, rate
from tests.helpers.server import MODEL, Frontend, data_of

TOOL: Any = {"type": "function", "function": {"name": "rate", "description": "Rate.", "parameters": PARAMETERS}}
CITY_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "strict": True,
        "schema": {**City.model_json_schema(), "additionalProperties": False},
    },
}


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say:{text}"}]


def chat(client: openai.OpenAI, text: str = "Hello", **more: Any) -> ChatCompletion:
    """The answer, held against the schema."""
    asked = {"model": MODEL, "messages": say(text)} | more
    raw = client.chat.completions.with_raw_response.create(**asked)
    held(ChatCompletion, raw.text)
    found: ChatCompletion = raw.parse()
    return found


def chunks(client: openai.OpenAI, text: str = "Hello", **more: Any) -> list[ChatCompletionChunk]:
    """The same of a stream."""
    asked = {"model": MODEL, "messages": say(text), "stream": True} | more
    with client.chat.completions.with_streaming_response.create(**asked) as raw:
        lines = [data for line in raw.iter_lines() if (data := data_of(line))]
    assert lines.pop() == "[DONE]"
    found = [held(ChatCompletionChunk, line) for line in lines]
    with client.chat.completions.create(**asked) as stream:
        assert spoken(list(stream)) == spoken(found)
    return found


def spoken(found: list[ChatCompletionChunk]) -> tuple[str, str]:
    """Texts and arguments: how they are cut depends on how fast they are read."""
    deltas = [choice.delta for chunk in found for choice in sorted(chunk.choices, key=lambda one: one.index)]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    texts = "".join(sorted("".join(delta.content or "" for delta in deltas)))
    return texts, "".join(call.arguments or "" for call in calls if call)


def content(answer: ChatCompletion) -> str | None:
    return answer.choices[0].message.content


# ----------------------------------------------------------------------------------------------------------- chats


def test_a_chat_has_text_role_finish_reason_and_usage(client: openai.OpenAI) -> None:
    found = chat(client, "Bonjour, 🙂!")
    choice = found.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Bonjour, 🙂!", "assistant", "stop")
    assert found.model == MODEL and found.id.startswith("chatcmpl-") and found.usage is not None
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@pytest.mark.parametrize(
    "before",
    [
        [{"role": "developer", "content": "Be brief."}],
        [{"role": "system", "content": "Be brief.", "name": "boss"}],
        [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
        [{"role": "user", "content": "Hi", "name": "bob"}, {"role": "assistant", "content": "Hello."}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "refusal": "No."}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}],
    ],
)
def test_conversations_are_answered(client: openai.OpenAI, before: list[Any]) -> None:
    assert content(chat(client, messages=[*before, *say("ok then")])) == "ok then"


def test_content_parts_are_joined(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "Please"}, {"type": "text", "text": "say:yes"}]
    assert content(chat(client, messages=[{"role": "user", "content": parts}])) == "yes"


NOTHING_CHANGES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"logit_bias": {"5": 3}},
    {"temperature": 0.3},
    {"top_p": 0.5},
    {"seed": 7},
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"store": True},
    {"service_tier": "auto"},
    {"safety_identifier": "x"},
    {"prompt_cache_key": "x"},
    {"prompt_cache_retention": "24h"},
    {"modalities": ["text"]},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "high"},
    {"verbosity": "medium"},
    {"verbosity": "low"},
    {"response_format": {"type": "text"}},
    {"max_completion_tokens": 50},
    {"max_tokens": 50},
    {"n": 1},
    {"stop": None},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}},
    {"prediction": {"type": "content", "content": "x"}},
    {"web_search_options": {}},
    {"service_tier": "flex"},
    {"extra_headers": {"OpenAI-Organization": "x", "OpenAI-Project": "y"}},
    {"extra_query": {"api-version": "1"}},
]


@pytest.mark.parametrize("more", NOTHING_CHANGES, ids=",".join)
def test_chat_arguments_are_accepted_also_in_a_stream(client: openai.OpenAI, more: dict[str, Any]) -> None:
    assert content(chat(client, **more)) == "Hello"
    assert "".join(one.choices[0].delta.content or "" for one in chunks(client, **more)) == "Hello"


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": "auto"}),
    ("audio", {"audio": {"voice": "alloy", "format": "wav"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]}),
    ("messages", {"messages": [{"role": "function", "name": "f", "content": "x"}]}),
]


@pytest.mark.refused
@pytest.mark.parametrize(("field", "more"), REFUSED)
def test_unsupported_chat_arguments_are_named(client: openai.OpenAI, field: str, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **more)
    assert (error.value.param or "").split(".")[0] == field and field in error.value.message


def test_n_gives_several_choices(client: openai.OpenAI) -> None:
    found = chat(client, n=3)
    assert [(one.index, one.message.content) for one in found.choices] == [(i, "Hello") for i in range(3)]
    texts = ["", "", ""]
    for chunk in chunks(client, n=3):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Hello"] * 3


@pytest.mark.parametrize("stop", ["l", ["x", "ll"]])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stop: Any) -> None:
    found = chat(client, stop=stop).choices[0]
    assert (found.message.content, found.finish_reason) == ("He", "stop")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_ends_a_chat_with_length(client: openai.OpenAI, name: str) -> None:
    found = chat(client, **{name: 3})
    assert (content(found), found.choices[0].finish_reason) == ("Hel", "length")
    assert found.usage is not None and found.usage.completion_tokens == 3
    assert chunks(client, **{name: 3})[-1].choices[0].finish_reason == "length"


def test_a_stream_begins_with_its_role_and_ends_with_its_reason(client: openai.OpenAI) -> None:
    found = chunks(client)
    assert found[0].choices[0].delta.role == "assistant" and len({one.id for one in found}) == 1
    assert [one.choices[0].finish_reason for one in found][-1] == "stop"
    assert all(one.choices[0].finish_reason is None for one in found[:-1])


def test_the_usage_of_a_stream(client: openai.OpenAI) -> None:
    *rest, last = chunks(client, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 6
    assert all(one.usage is None for one in rest)


def test_log_probabilities(client: openai.OpenAI) -> None:
    found = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert found is not None and found.content is not None


@pytest.mark.parametrize("form", [{"type": "json_object"}, CITY_FORMAT], ids=["json_object", "json_schema"])
def test_a_response_format_gives_matching_json(client: openai.OpenAI, form: Any) -> None:
    assert json.loads(content(chat(client, CITY, response_format=form)) or "") == {"name": "Paris", "rank": 1}


def test_parse_returns_the_model_class(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model=MODEL, messages=say(CITY), response_format=City)
    assert found.choices[0].message.parsed == City(name="Paris", rank=1)


def test_parse_of_a_cut_answer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=say(CITY), response_format=City, max_tokens=4)


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=say(CITY), response_format=City) as stream:
        seen = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == City(name="Paris", rank=1)
    assert "".join(event.delta for event in seen if event.type == "content.delta") == CITY
    [done] = [event for event in seen if event.type == "content.done"]
    assert (done.content, done.parsed) == (CITY, City(name="Paris", rank=1))
    with client.chat.completions.stream(model=MODEL, messages=say("Hello")) as stream:
        assert stream.until_done().get_final_completion().choices[0].message.content == "Hello"


CHOICES: list[Any] = [
    ("auto", "tool_calls"),
    ("required", "tool_calls"),
    ({"type": "function", "function": {"name": "rate"}}, "stop"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, "tool_calls"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, "tool_calls"),
]


@pytest.mark.parametrize(("choice", "reason"), CHOICES)
def test_a_tool_call_is_parsed_also_in_a_stream(client: openai.OpenAI, choice: Any, reason: str) -> None:
    found = chat(client, CALL, tools=[TOOL], tool_choice=choice).choices[0]
    assert found.finish_reason == reason and found.message.content is None and found.message.tool_calls
    [call] = found.message.tool_calls
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("rate", '{"rank": 7}')
    seen = [one for chunk in chunks(client, CALL, tools=[TOOL], tool_choice=choice) for one in chunk.choices]
    deltas = [one for choice in seen for one in choice.delta.tool_calls or ()]
    assert [one.id is not None for one in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(one.function.arguments or "" for one in deltas if one.function) == '{"rank": 7}'
    assert seen[-1].finish_reason == reason


def test_several_calls_and_text_around_them(client: openai.OpenAI) -> None:
    found = chat(client, f"First.{CALL}{CALL}", tools=[TOOL], parallel_tool_calls=True).choices[0].message
    assert found.content == "First." and len(found.tool_calls or ()) == 2
    assert len({call.id for call in found.tool_calls or ()}) == 2


def test_a_strict_tool_is_parsed(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(rate)]
    found = client.chat.completions.parse(model=MODEL, messages=say(CALL), tools=tools).choices[0].message
    assert found.tool_calls and found.tool_calls[0].function.parsed_arguments == rate(rank=7)
    with client.chat.completions.stream(model=MODEL, messages=say(CALL), tools=tools) as stream:
        [done] = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == ("rate", rate(rank=7))


def test_a_tool_result_is_answered(client: openai.OpenAI) -> None:
    first = chat(client, CALL, tools=[TOOL]).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "say:seven"}
    assert content(chat(client, messages=[*say(CALL), first, result], tools=[TOOL])) == "seven"


@pytest.mark.refused
def test_stored_chats_are_not_supported(client: openai.OpenAI) -> None:
    kept = client.chat.completions
    for call in (kept.retrieve, kept.delete, kept.messages.list):
        with pytest.raises(openai.APIStatusError) as error:
            call("chatcmpl-1")
        assert error.value.status_code in (404, 405)


async def test_the_asynchronous_client(scripted: Frontend) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=say("Hello"))
        stream = await client.chat.completions.create(model=MODEL, messages=say("Hello"), stream=True)
        text = "".join([one.choices[0].delta.content or "" async for one in stream])
        async with client.chat.completions.stream(model=MODEL, messages=say(CITY), response_format=City) as helper:
            final = await helper.get_final_completion()
    assert whole.choices[0].message.content == text == "Hello"
    assert final.choices[0].message.parsed == City(name="Paris", rank=1)
