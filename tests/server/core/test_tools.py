"""Tools of a chat: what the model is shown, what is refused, and its calls, whole and as a stream; what it thinks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.server import Frontend, chat_body, check_error, events, prompt_text

PATH = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {}}},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


def ask(http: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    """The only choice, which streamed is the same."""
    response = http.post(PATH, json=chat_body(text, **more))
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    body = chat_body(text, stream=True, stream_options={"include_usage": True}, **more)
    *chunks, last, _ = events(http.post(PATH, json=body).text)
    for chunk in chunks:
        [one] = chunk["choices"]
        reason = one["finish_reason"] or reason
        delta = one["delta"]
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name) or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(found["tool_calls"]):
                assert sorted(call) == ["function", "id", "index", "type"] and call["function"]["arguments"] == ""
                found["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                assert call["index"] == len(found["tool_calls"]) - 1
                found["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    message = choice["message"]
    assert reason == choice["finish_reason"]
    of_both = [{**usage, "prompt_tokens_details": None} for usage in (last["usage"], response.json()["usage"])]
    assert of_both[0] == of_both[1]
    assert found["content"] == (message["content"] or "")
    assert found["reasoning_content"] == (message.get("reasoning_content") or "")
    assert [call["function"] for call in found["tool_calls"]] == [
        call["function"] for call in message.get("tool_calls", ())
    ]
    choice["usage"] = response.json()["usage"]
    return choice


def test_a_call(http: httpx.Client) -> None:
    choice = ask(http, f"say:<tool_call>\n{PARIS}\n</tool_call>", tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


def test_calls_in_a_stream_begin_once(http: httpx.Client) -> None:
    said = f'burst:Well.<tool_call>{PARIS}</tool_call><tool_call>{{"name": "now"}}</tool_call>'
    choice = ask(http, said, tools=[NOW])
    assert choice["message"]["content"] == "Well."
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}, {"name": "now", "arguments": "{}"}]


def test_a_call_that_is_asked_for_by_name_stops(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(http, f"say:<tool_call>{PARIS}</tool_call>", tools=TOOLS, tool_choice=named)
    assert choice["finish_reason"] == "stop" and len(choice["message"]["tool_calls"]) == 1


def test_text_is_text(http: httpx.Client) -> None:
    for said in ("Hello <b>!</b>\n", "<tool_call>no</tool_call>", '<tool_call>{"name": "now", "argu'):
        choice = ask(http, f"say:{said}", tools=TOOLS)
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == said
        assert "tool_calls" not in choice["message"]


def test_without_tools_nothing_is_a_call(http: httpx.Client) -> None:
    said = f"<tool_call>{PARIS}</tool_call>"
    for more in ({}, {"tools": []}, {"tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}):
        assert ask(http, f"say:{said}", **more)["message"]["content"] == said


def test_several_answers_are_taken_apart_each(http: httpx.Client) -> None:
    said = f"say:<think>hm</think><tool_call>{PARIS}</tool_call>"
    response = http.post(PATH, json=chat_body(said, tools=TOOLS, n=2)).json()
    messages = [choice["message"] for choice in response["choices"]]
    assert [message["reasoning"] for message in messages] == ["hm", "hm"]
    assert len({message["tool_calls"][0]["id"] for message in messages}) == 2
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}  # "hm", twice


def test_what_is_thought(http: httpx.Client) -> None:
    choice = ask(http, "say:<think>\nWell, hm.\n</think>\n\nYes.")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Well, hm.",
        "reasoning": "Well, hm.",
    }
    assert choice["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Well, hm.")}


def test_what_is_thought_may_be_left_out_or_left_in(http: httpx.Client) -> None:
    said = "<think>hm</think>Yes."
    message = ask(http, f"say:{said}", include_reasoning=False)["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None}
    message = ask(http, f"say:{said}", separate_reasoning=False)["message"]
    assert message == {"role": "assistant", "content": said, "refusal": None}


def test_an_answer_that_goes_on_with_a_thought(http: httpx.Client) -> None:
    """The prompt shows whether the model thinks already."""
    for begun, content, reasoning in (("<think>so ", "Yes.", "hm"), ("<think>a</think>", "hm</think>Yes.", None)):
        messages = [{"role": "user", "content": "say:hm</think>Yes."}, {"role": "assistant", "content": begun}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        message = http.post(PATH, json=body).json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning")) == (content, reasoning)


def test_ids_and_log_probabilities_are_those_of_the_tokens(http: httpx.Client) -> None:
    said = f"say:<tool_call>{PARIS}</tool_call>"
    body = chat_body(said, tools=TOOLS, return_token_ids=True)
    whole = http.post(PATH, json=body).json()["choices"][0]
    chunks = events(http.post(PATH, json={**body, "stream": True}).text)[:-1]
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", ())]
    assert ids == whole["token_ids"] and bytes(ids[:-1]).decode() == said.removeprefix("say:")


# ------------------------------------------------------------------------------------------- what the model is shown


def test_a_template_without_tools_has_them_explained(http: httpx.Client, server: Frontend) -> None:
    messages = [
        {"role": "system", "content": "Hm"},
        {"role": "user", "content": "explained"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
        {"role": "user", "content": "say:ok"},
    ]
    assert http.post(PATH, json={"messages": messages, "tools": [WEATHER]}).status_code == 200
    shown = prompt_text(server.engine.wait_for_request("explained"))
    system, rest = shown.split("</system>\n")
    assert system.startswith("<system>Hm\n\n") and "<tool_call>" in system
    assert json.dumps(WEATHER["function"]["parameters"]) in system and '"name": "get_weather"' in system
    assert rest == (
        '<user>explained</user>\n<assistant><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}'
        "\n</tool_call></assistant>\n<user>Result of the call: Sunny.</user>\n<user>say:ok</user>\n<assistant>"
    )


def test_no_choice_is_no_tools(http: httpx.Client, server: Frontend) -> None:
    ask(http, "say:unseen", tools=TOOLS, tool_choice="none")
    assert prompt_text(server.engine.wait_for_request("unseen")) == "<user>say:unseen</user>\n<assistant>"


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "bash"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_makes_no_sense_is_refused(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    assert check_error(http.post(PATH, json=chat_body("refused", **more)), 400)["param"] == param


def test_two_tools_of_one_name_are_refused_by_name(http: httpx.Client) -> None:
    error = check_error(http.post(PATH, json=chat_body("refused", tools=[NOW, NOW])), 400)
    assert error["param"] == "tools.1.function.name" and "another tool has this name: give each" in error["message"]


def test_tools_need_a_conversation(http: httpx.Client) -> None:
    assert check_error(http.post(PATH, json={"prompt": "refused", "tools": TOOLS}), 400)["param"] == "tools"


# -------------------------------------------------------------------------------------------------------- grammars


def grammar_of(http: httpx.Client, server: Frontend, mark: str, **more: Any) -> str | None:
    assert http.post(PATH, json=chat_body(f"say:{mark}", **more)).status_code == 200
    return server.engine.wait_for_request(mark).sampling.grammar


def test_what_binds_an_answer_goes_to_the_engine(http: httpx.Client, server: Frontend) -> None:
    strict = [{"type": "function", "function": {**NOW["function"], "strict": True}}]
    assert grammar_of(http, server, "g-auto", tools=[NOW]) is None
    assert grammar_of(http, server, "g-none", tools=strict, tool_choice="none") is None
    for i, more in enumerate(
        ({"tool_choice": "required"}, {"parallel_tool_calls": False}, {"tools": strict}, {"tools": strict, "n": 2})
    ):
        found = grammar_of(http, server, f"g-{i}", **{"tools": [NOW], **more})
        assert found is not None and "now" in found and "</think>" in found
    form = grammar_of(http, server, "g-form", response_format={"type": "json_object"})
    assert form is not None and "</think>" in form  # what is thought is free


def test_what_cannot_stand_beside_a_grammar_is_named(http: httpx.Client) -> None:
    for field, value in (("ignore_eos", True), ("min_tokens", 3)):
        body = chat_body("refused", tools=[NOW], tool_choice="required", **{field: value})
        assert check_error(http.post(PATH, json=body), 400)["param"] == field


# ------------------------------------------------------------------------------------------------- some of the tools


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


def test_of_allowed_tools_the_model_hears_of_no_others(server: Frontend, http: httpx.Client) -> None:
    text = "say:<tool_call>" + PARIS + "</tool_call>one-allowed"
    choice = ask(http, text, tools=TOOLS, tool_choice=allowed("get_weather"))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    shown = prompt_text(server.engine.requests("one-allowed")[-1])
    assert "get_weather" in shown and '"now"' not in shown


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("other"), "tool_choice.allowed_tools.tools.0"),
        (allowed(), "tool_choice"),
        (allowed("now", mode="any"), "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}},
            "tool_choice.allowed_tools.tools.0",
        ),
    ],
)
def test_a_wrong_choice_of_allowed_tools_is_named(http: httpx.Client, choice: Any, param: str) -> None:
    response = http.post(PATH, json=chat_body("say:x", tools=TOOLS, tool_choice=choice))
    assert check_error(response, 400)["param"] == param


def test_a_budget_of_thinking_that_no_token_ends_is_named(http: httpx.Client) -> None:
    """The echo engine's markers are texts."""
    body = {"messages": [{"role": "user", "content": "say:ok"}], "thinking_budget": 4}
    found = http.post(PATH, json=body)
    assert found.status_code == 200 and found.headers["x-minisgl-ignored"] == "thinking_budget"
    refused = http.post(PATH, json={**body, "thinking_budget": 0})
    assert refused.status_code == 400 and "thinking_budget" in refused.json()["error"]["message"]
    anthropic = {**body, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 4}}
    del anthropic["thinking_budget"]
    assert http.post("/v1/messages", json=anthropic).headers["x-minisgl-ignored"] == "thinking_budget"
