"""Tools with OpenAI's own client, on real engines: calls that are asked for come, in any mode, with arguments that
validate; SmolLM2's template knows no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
DAYS = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["days"]}
DAYS["additionalProperties"] = False
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "plan_trip": DAYS}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "plan_trip"}}
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
ENGINES = {
    "smollm2": ["--model", "smollm2"],
    "smollm2-hermes": ["--model", "smollm2", "--tool-call-parser", "hermes"],
    "echo": ["--engine", "echo", "--tool-call-parser", "llama3_json"],
}
OTHERS = ("qwen3_coder", "glm45", "gemma4", "lfm2", "harmony", "kimi_k2", "deepseek_v3", "command")
ENGINES |= {name: ["--engine", "echo", "--tool-call-parser", name] for name in OTHERS}
SLOW = ("smollm2-hermes", *OTHERS[1:])


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENGINES]
)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with serving(*ENGINES[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=4 * WAIT_S) as found:
        yield found


def check_calls(calls: Any) -> list[str]:
    """Their names."""
    for call in calls:
        assert call.type == "function" and call.id
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)
    return [call.function.name for call in calls]


def asked(client: openai.OpenAI, **more: Any) -> dict[str, Any]:
    """That the weather is asked for with a call; `more` may say otherwise."""
    model = client.models.list().data[0].id
    return {"model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", **more}


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**asked(client, **more))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tool_choice_required_gives_exactly_one_call(client: openai.OpenAI, temperature: float) -> None:
    """One, unless several are asked for."""
    for choice in ask(client, temperature=temperature, seed=1, n=4, max_tokens=200).choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert len(check_calls(choice.message.tool_calls)) == 1


def test_a_named_tool_choice_gives_a_call_of_that_tool(client: openai.OpenAI) -> None:
    [choice] = ask(client, tool_choice=NAMED, temperature=1, seed=2).choices
    assert choice.finish_reason == "stop"
    assert check_calls(choice.message.tool_calls) == ["plan_trip"]


def test_several_tool_calls_are_possible(client: openai.OpenAI) -> None:
    choices = ask(client, parallel_tool_calls=True, temperature=1, seed=3, n=8, max_tokens=200).choices
    counts = [len(check_calls(choice.message.tool_calls)) for choice in choices if choice.finish_reason != "length"]
    assert counts and min(counts) >= 1


def test_streamed_tool_calls_equal_those_not_streamed(client: openai.OpenAI) -> None:
    body = asked(client, parallel_tool_calls=False, temperature=1, seed=4)
    whole = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    functions = [[call.function for call in choice.message.tool_calls or ()] for choice in (whole, streamed)]
    assert [(one.name, one.arguments) for one in functions[0]] == [(one.name, one.arguments) for one in functions[1]]


def test_strict_tools_are_strict_where_the_model_decides(client: openai.OpenAI) -> None:
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for choice in ask(client, tools=tools, tool_choice="auto", temperature=1, seed=5, n=8, max_tokens=60).choices:
        if choice.message.tool_calls and choice.finish_reason != "length":
            check_calls(choice.message.tool_calls)


def test_a_tool_result_is_answered_with_text(client: openai.OpenAI) -> None:
    message = ask(client, parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    messages = [*MESSAGES, message.model_dump(exclude_none=True), result]
    goes_on = {"ignore_eos": True}  # the id of a call is made up: of some, the answer would be nothing
    answer = ask(client, messages=messages, tool_choice="none", max_tokens=20, extra_body=goes_on)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_a_schema_that_cannot_be_kept_to_is_named(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, tools=[*TOOLS, bad])
    assert error.value.param == "tools.2.function.parameters.properties.a.uniqueItems"
