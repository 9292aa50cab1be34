"""Bodies of embeddings, responses and messages as clients send them: strategies of hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.helpers.bodies import FUNCTIONS, answers, fails_alike, odd_prompts, plain_texts, seeds

EMBEDDINGS, MESSAGES, RESPONSES = "/v1/embeddings", "/v1/messages", "/v1/responses"

_ids = st.lists(st.integers(0, 255), min_size=1, max_size=9)
inputs = st.one_of(
    plain_texts,
    st.lists(st.one_of(plain_texts, st.just("a")), min_size=1, max_size=4),
    _ids,
    st.lists(_ids, min_size=1, max_size=3),
    st.just(["x"] * 300),
)


@st.composite
def embedding_bodies(draw: st.DrawFn) -> dict[str, Any]:
    body: dict[str, Any] = {"input": draw(inputs)}
    for name, values in {
        "model": ["adapter", "scripted", None],
        "encoding_format": ["float", "base64", None],
        "dimensions": [1, 2, 3, 5, None],
        "pooling": ["mean", "last"],
        "priority": [0, -3],
        "user": ["u", None],
    }.items():
        if draw(st.booleans()):
            body[name] = draw(st.sampled_from(values))
    if draw(st.integers(0, 5)) == 0:
        body |= draw(
            st.sampled_from(
                [
                    {"dimensions": 0},
                    {"dimensions": 1.0},
                    {"encoding_format": "int8"},
                    {"pooling": "max"},
                    {"priority": 9},
                    {"truncate_prompt_tokens": 2},
                    {"model": "other"},
                    {"input": "x" * 600},
                    {"input": ["x"] * 1025},
                    {"unknown": 1},
                ]
            )
        )
    if draw(st.integers(0, 9)) == 0:
        body["input"] = draw(odd_prompts)
    return body


# ---------------------------------------------------------------------------------------------------------- messages

_block = st.one_of(
    plain_texts.map(lambda text: {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}),
    st.just({"type": "text", "text": "a"}),
)
_of_user = st.one_of(
    plain_texts,
    st.lists(_block, min_size=1, max_size=3),
    st.sampled_from(
        [
            [{"type": "tool_result", "tool_use_id": "c", "content": "5"}],
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "é"}],
                    "is_error": True,
                },
                {"type": "text", "text": "so"},
            ],
            [{"type": "tool_result", "tool_use_id": "c"}],
        ]
    ),
)
_of_assistant = st.one_of(
    plain_texts,
    st.sampled_from(
        [
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "thinking", "thinking": "é"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "get", "input": {"a": 1.0, "b": [1e5, None, "é\n"], "c": {}}},
            ],
            [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}],
            [{"type": "tool_use", "id": "c", "name": "now", "input": {}}, {"type": "text", "text": "x"}],
            [],
        ]
    ),
)
_tools = st.lists(st.sampled_from(FUNCTIONS), min_size=1, max_size=3, unique_by=lambda one: str(one["name"])).map(
    lambda found: [
        {"input_schema": {"type": "object"}, **{k: v for k, v in one.items() if k != "parameters"}}
        | ({"input_schema": one["parameters"]} if "parameters" in one else {})
        for one in found
    ]
)
_schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_MESSAGES: dict[str, st.SearchStrategy[Any]] = {
    "system": st.one_of(plain_texts, st.lists(_block, max_size=3)),
    "tools": _tools,
    "thinking": st.sampled_from(
        [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}]
    ),
    "stream": st.booleans(),
    "stop_sequences": st.sampled_from([["}"], ["hm", "\n\n"], ["k"], []]),
    "stop": st.sampled_from(["o", ["v"]]),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "top_k": st.sampled_from([0, 5]),
    "top_p": st.sampled_from([0.9, 1]),
    "metadata": st.just({"user_id": "u"}),
    "receipt": st.booleans(),
    "output_config": st.sampled_from([{"effort": "low"}, {"format": {"type": "json_schema", "schema": _schema}}, {}]),
    "output_format": st.just({"type": "json_schema", "schema": _schema}),
    "service_tier": st.sampled_from(["auto", "standard_only"]),
    "model": st.sampled_from(["adapter", "scripted", None]),
    "priority": st.sampled_from([-3, 0]),
    "stop_token_ids": st.just([107]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"x": [1, 2.5]}]),
}
_odd_messages = st.sampled_from(
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"n": 2},
        {"n": 1},
        {"system": 5},
        {"system": [{"type": "image"}]},
        {"tool_choice": {"type": "any"}, "tools": []},
        {"tool_choice": {"type": "tool", "name": "nobody"}},
        {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tools": [{"name": "a", "input_schema": {"maximum": 10**30}}]},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"stop_sequences": [""]},
        {"stop_sequences": ["a"] * 65},
        {"response_format": {"type": "text"}},
        {"thinking": {"type": "often"}},
        {"output_format": {"type": "text"}},
        {"stream_options": {"include_usage": True}},
        {"container": "x"},
        {"logprobs": True},
        {"unknown": 1},
        {"messages": []},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "say:a"}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "n", "input": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
        {"messages": [{"role": "user", "content": [["text", "a"]]}]},
        {"messages": [["user", "a"]]},
    ]
)


@st.composite
def message_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """As Anthropic's clients send them; the engine's answer is in the last message."""
    body: dict[str, Any] = {"seed": draw(seeds), "max_tokens": draw(st.sampled_from([100, 100, 20])), "messages": []}
    for _ in range(draw(st.integers(0, 2))):
        body["messages"].append({"role": "user", "content": draw(_of_user)})
        body["messages"].append({"role": "assistant", "content": draw(_of_assistant)})
    last = draw(answers)
    for name, values in OF_MESSAGES.items():
        if draw(st.integers(0, 2)) == 0:
            body[name] = draw(values)
    if "tools" in body and draw(st.booleans()):
        choice = draw(st.sampled_from(["auto", "any", "none", "tool"]))
        body["tool_choice"] = {"type": choice, **({"name": body["tools"][0]["name"]} if choice == "tool" else {})}
        if draw(st.booleans()):
            body["tool_choice"]["disable_parallel_tool_use"] = draw(st.booleans())
    if not fails_alike(body) or body.get("stop_sequences"):
        last = last.replace("fail:", "say:", 1)
    body["messages"].append({"role": "user", "content": last})
    if draw(st.integers(0, 7)) == 0:
        body |= draw(_odd_messages)
    return body


# --------------------------------------------------------------------------------------------------------- responses

_items = st.lists(
    st.sampled_from(
        [
            {"role": "user", "content": "hi"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "é"}], "id": "msg_1"},
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "so"}, {"type": "refusal", "refusal": "n"}],
            },
            {"role": "assistant", "content": "well"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "é"}], "encrypted_content": None},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "é"}]},
            {"role": "user", "content": []},
        ]
    ),
    max_size=5,
)
_response_tools = st.lists(
    st.sampled_from(FUNCTIONS), min_size=1, max_size=3, unique_by=lambda one: str(one["name"])
).map(lambda found: [{"type": "function", **one} for one in found])
_format = {"type": "json_schema", "name": "a", "schema": _schema, "strict": None}
OF_RESPONSES: dict[str, st.SearchStrategy[Any]] = {
    "instructions": plain_texts,
    "tools": _response_tools,
    "parallel_tool_calls": st.booleans(),
    "text": st.sampled_from(
        [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": _format}, {}]
    ),
    "reasoning": st.sampled_from([{"effort": "none"}, {"effort": "low", "summary": "auto"}, {"summary": None}]),
    "max_output_tokens": st.sampled_from([100, 20, 1]),
    "max_tool_calls": st.just(3),
    "include": st.sampled_from([["reasoning.encrypted_content"], []]),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "metadata": st.sampled_from([{"a": "b"}, {}]),
    "user": st.just("u"),
    "safety_identifier": st.just("s"),
    "prompt_cache_key": st.just("k"),
    "receipt": st.booleans(),
    "stream": st.booleans(),
    "stop": st.sampled_from(["o", ["v"]]),
    "temperature": st.sampled_from([0, 0.5, 1]),
    "top_p": st.sampled_from([0.9, 1]),
    "service_tier": st.just("auto"),
    "background": st.just(False),
    "model": st.sampled_from(["adapter", "scripted", None]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"x": [1, 2.5]}]),
}
_odd_responses = st.sampled_from(
    [
        {"previous_response_id": "resp_1"},
        # streamed, it depends on the moment which section has those of a marker
        {"top_logprobs": 2, "stream": False},
        {"include": ["message.output_text.logprobs"], "stream": False},
        {"max_output_tokens": 0},
        {"max_tokens": 5},
        {"n": 2},
        {"background": True},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "xml"}}},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "detailed"}},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "nobody"}]}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp"}]},
        {"tools": [{"type": "custom", "name": "a"}, {"type": "namespace", "name": "n", "tools": []}]},
        {"tools": [{"type": "function", "name": "a b"}]},
        {"metadata": {"a": 1}},
        {"metadata": {str(i): "x" for i in range(17)}},
        {"response_format": {"type": "text"}},
        {"conversation": "c"},
        {"truncation": "often"},
        {"input": []},
        {"input": None},
        {"input": 5},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"id": "msg_1"}]},
        {"input": [{"role": "tool", "content": "a"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        {"input": [{"type": "function_call", "call_id": "c"}]},
        {"input": [{"type": "function_call", "call_id": "c", "name": "a", "namespace": "n", "arguments": "{}"}]},
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "a", "input": "x"}]},
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        {"input": [{"type": "reasoning", "content": "a"}]},
        {"input": [["user", "a"]]},
        {"unknown": 1},
    ]
)


@st.composite
def response_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """As OpenAI's clients send them; the engine's answer is in the last item."""
    body: dict[str, Any] = {"seed": draw(seeds), "store": draw(st.booleans())}
    last = draw(answers)
    for name, values in OF_RESPONSES.items():
        if draw(st.integers(0, 2)) == 0:
            body[name] = draw(values)
    if "tools" in body and draw(st.booleans()):
        name = {"type": "function", "name": body["tools"][0]["name"]}
        allowed = [{"type": "allowed_tools", "mode": mode, "tools": [name]} for mode in ("auto", "required")]
        body["tool_choice"] = draw(st.sampled_from(["auto", "none", "required", name, *allowed]))
    if not fails_alike(body):
        last = last.replace("fail:", "say:", 1)
    body["input"] = draw(st.sampled_from([last, [*draw(_items), {"role": "user", "content": last}]]))
    if draw(st.integers(0, 7)) == 0:
        body |= draw(_odd_responses)
    return body
