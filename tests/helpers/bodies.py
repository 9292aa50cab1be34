"""Hypothesis strategies for request bodies: as clients send them, and invalid ones.

A body is built as a value, in which a `Raw` is JSON text and `Pairs` an object that may repeat a key, and then written
in one of the ways that JSON allows, or damaged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.helpers.edges import at_edges

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@dataclass(frozen=True)
class Raw:
    """Text to be written in place of a JSON value; it need not be valid JSON."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """JSON object as ordered pairs; a key may occur twice."""

    pairs: tuple[tuple[str, Any], ...]


# ------------------------------------------------------------------------------------------------------------- JSON


def written(value: Any, *, ascii_only: bool = True, spaced: bool = False) -> str:
    """Return the value as JSON text."""
    comma, colon = (" ,\n", " : ") if spaced else (",", ":")
    match value:
        case Raw(text):
            return text
        case Pairs(pairs):
            parts = [written(k, ascii_only=ascii_only) + colon + written(v, ascii_only=ascii_only) for k, v in pairs]
            return "{" + comma.join(parts) + "}"
        case dict():
            return written(Pairs(tuple(value.items())), ascii_only=ascii_only, spaced=spaced)
        case list() | tuple():
            return "[" + comma.join(written(one, ascii_only=ascii_only) for one in value) + "]"
        case _:
            return json.dumps(value, ensure_ascii=ascii_only)


PIECES = [
    "a",
    "the",
    " time",
    "Hello",
    "\n",
    "é",
    "日本",
    "🙂",
    "<",
    "</user>",
    "<|eos|>",
    "<|bos|>",
    '"',
    "\\",
    "\t",
    "0",
]
plain_texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
texts = st.one_of(
    plain_texts,
    st.text(max_size=12),
    st.sampled_from(["", " ", "\x00", "\ufeff", "\u2028", "x" * 600, "é" * 300, "\U0010ffff"]),
)
raw_texts = st.sampled_from(
    [r'"\ud800"', r'"\udc00\ud800"', r'"a\u0000b"', r'"\uD83D\uDE00"', r'"\x"', '"\n"', r'"\/"']
)
any_texts = st.one_of(texts, texts, texts, raw_texts.map(Raw))
odd_values = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2, 3, 16, 0.5, 1.0, -0.0, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30]),
    st.sampled_from(["", "1", "none", "auto", "text", "x"]),
    st.sampled_from([[], {}, [1], ["a"], [[]], [None], {"a": 1}, [1, "a"], [["a"]], [[1, 2], [3]]]),
    st.sampled_from(["NaN", "-Infinity", "1e400", "-0", "1E2", "1.", ".5", "01", "+1", "nul", "1e-400"]).map(Raw),
    st.sampled_from(["[" * 40 + "]" * 40, "[" * 300 + "]" * 300, '{"a":' * 150 + "1" + "}" * 150]).map(Raw),
)

# ----------------------------------------------------------------------------------------------------------- bodies

stops = st.one_of(
    st.sampled_from(["a", " t", "e", "zq", "\n", "ei", "é"]),
    st.lists(st.sampled_from(["a", " t", "io", "xyz", "é", "e "]), max_size=4),
)
seeds = st.integers(0, 50)
max_tokens = st.integers(1, 40)
_unit = st.sampled_from([0, 0.25, 0.9, 1, 1.0])
_signed = st.sampled_from([0, 0.5, -1.5, 2, -2])

USUAL: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["m", "m", "m", None]),
    "temperature": st.sampled_from([0, 0.0, 0.7, 1, 1.5, 2]),
    "top_p": _unit,
    "n": st.integers(1, 3),
    "stop": st.one_of(stops, st.none()),
    "frequency_penalty": _signed,
    "presence_penalty": _signed,
    "user": st.sampled_from(["u", "", None]),
    "receipt": st.sampled_from([True, True, False, None]),
}
RARE: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([-1, 0, 1, 40]),
    "min_p": _unit,
    "repetition_penalty": st.sampled_from([1, 1.1, 0.5]),
    "min_tokens": st.sampled_from([0, 1, 5, 100]),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.sampled_from([32, 97, 101, 256]), max_size=3),
    "logit_bias": st.sampled_from([{}, {"65": 5}, {"65": -100, "66": 0.5}, {"300": 1}]),
    "allowed_token_ids": st.sampled_from([[97, 98], [], [1000], None]),
    "bad_words": st.sampled_from([[], ["a"], ["io", "te"], [""], None]),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 5, 0, 600, None]),
    "return_token_ids": st.booleans(),
    "priority": st.sampled_from([0, 1, -5]),
    "metadata": st.sampled_from([{}, {"a": "b"}, None]),
    "store": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, None]),
    "tools": st.sampled_from([[], None, [{"type": "function", "function": {"name": "f"}}]]),
    "tool_choice": st.sampled_from(["none", "auto"]),
    "logprobs": st.sampled_from([True, False, None, 0, 2]),
    "top_logprobs": st.sampled_from([0, 2, None]),
    "prompt_logprobs": st.sampled_from([0, 1, None]),
    "echo": st.booleans(),
    "best_of": st.sampled_from([1, 2]),
    "suffix": st.sampled_from(["", "x"]),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": False}, {"messages": []}, None]),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "unknown_field": odd_values,
    "parallel_tool_calls": st.sampled_from([True, False, None, "no"]),
    "enable_thinking": st.sampled_from([True, False, None, 1]),
    "include_reasoning": st.sampled_from([True, False, None]),
    "separate_reasoning": st.sampled_from([True, False, "no"]),
    "receipt": st.sampled_from([True, 1, {"adapter": 0, "answer": None}]),
}

parts = st.one_of(
    any_texts.map(lambda text: {"type": "text", "text": text}),
    any_texts.map(lambda text: {"type": "refusal", "refusal": text}),
    st.sampled_from([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {}, "a", {"text": "a"}]),
)
text_parts = st.lists(plain_texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
usual_messages = st.builds(
    lambda system, turns: [*system, *turns],
    st.lists(plain_texts.map(lambda text: {"role": "system", "content": text}), max_size=1),
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "user"]), "content": st.one_of(plain_texts, text_parts)}
        ),
        min_size=1,
        max_size=4,
    ),
)
odd_messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot", "", None, 1])},
            optional={
                "content": st.one_of(any_texts, st.lists(parts, max_size=3), odd_values),
                "name": st.one_of(texts, odd_values),
                "refusal": st.one_of(texts, st.none()),
                "tool_calls": st.sampled_from(
                    [[], None, [{"id": "1", "function": {"name": "f", "arguments": "{}"}}], [1]]
                ),
                "tool_call_id": st.sampled_from(["1", None, 1]),
                "extra": odd_values,
            },
        ),
        odd_values,
    ),
    max_size=4,
)
odd_prompts = st.one_of(
    any_texts,
    st.lists(any_texts, max_size=3),
    st.lists(st.sampled_from([0, 1, 97, 200, 257, 258, -1, 2**31, 1.5, True, None]), max_size=5),
    st.lists(st.lists(st.integers(0, 255), max_size=3), max_size=3),
    odd_values,
)


@st.composite
def usual_bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """Draw a request body as clients of OpenAI's API send it."""
    body: dict[str, Any] = {"seed": draw(seeds)}
    limit = draw(st.sampled_from(["max_tokens", "max_completion_tokens"] if path == CHAT else ["max_tokens"]))
    body[limit] = draw(max_tokens)
    for name, values in USUAL.items():
        if not (path == GENERATE and name == "n") and draw(st.integers(0, 3)) == 0:
            body[name] = draw(values)
    if path == CHAT:
        body["messages"] = draw(usual_messages)
    elif path == COMPLETION:
        prompt = plain_texts.filter(bool)
        body["prompt"] = draw(st.one_of(prompt, prompt, st.lists(prompt, min_size=1, max_size=3)))
    else:
        body["prompt"] = draw(plain_texts.filter(bool))
    if draw(st.booleans()):
        body["stream"] = True
        if path != GENERATE and draw(st.booleans()):
            body["stream_options"] = {"include_usage": draw(st.booleans())}
    return body


# ------------------------------------------------------------------------------- what agents ask of models with tools

THOUGHTS = [
    "",
    "",
    "\x01\nhm, \xe9\n\x02\n\n",
    "\x01a\x02",
    "b\x02",
    " \n\x01 \n",
    "\x01\x02",
    "\x01\n\n\x02\n\nx\x02",
    "<thin",
]
CALLS = [
    '\x03\n{"name": "get", "arguments": {"a": 1, "b": "\xe9\\n"}}\n\x04',
    '\x03{"name": "put", "arguments": {"c": [{}, "}"]}}\x04',
    '\x03\n[{"name": "get", "arguments": {}}, {"name": "now", "parameters": "{}"}]\n\x04',
    '\x03{"arguments": {"a": 2}, "name": "get"}\x04',
    '\x03{"name": "now"}',
    '\x03{"name": 5}\x04',
    "\x03 no call \x04",
    '{"name": "get", "arguments": {}}',
    "\x04",
]
answers = st.builds(
    lambda order, thought, parts: f"{order}:{thought}{''.join(parts)}",
    st.sampled_from(["say", "say", "burst", "fail"]),
    st.sampled_from(THOUGHTS),
    st.lists(
        st.one_of(st.sampled_from(CALLS), st.sampled_from(["ok", " ", "\n\n", "na\xefve", "{}", "1"])), max_size=4
    ),
)
_A = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get", "description": "Gets \xe9.", "parameters": _A},
    {"name": "put", "parameters": {**_A, "additionalProperties": False}, "strict": True},
    {"name": "now"},
    {"name": "any", "parameters": {}},
]
tools = st.lists(st.sampled_from(FUNCTIONS), min_size=1, max_size=3, unique_by=lambda one: one["name"]).map(
    lambda found: [{"type": "function", "function": one} for one in found]
)


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


tool_choices = st.sampled_from(
    [
        *("auto", "none", "required", _named("get"), _named("now"), None),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_named("get")]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [_named("get")]}},
    ]
)
forms = st.sampled_from(
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _A, "strict": True}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "\xe9", "schema": {"enum": ["\xe9", 1.5, None]}},
            }
        },
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"choice": ["a", "\xe9"]}},
        {"guided_json": _A, "guided_whitespace_pattern": " ?"},
        {"regex": "[a-z]+\\d"},
        {"ebnf": 'root ::= "a" | "b"'},
        {"guided_choice": []},
    ]
)
bad_forms = st.sampled_from(
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "regex": "a"},
        {"regex": "("},
        {"guided_json": {"type": "object", "properties": {"a": {"format": "nonsense"}}}},
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        {"response_format": {"type": "json_object"}, "min_tokens": 2},
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [_named("a"), _named("a")]},
        {"tools": [_named("a")], "tool_choice": _named("b")},
        {"tools": [_named("a")], "tool_choice": {"type": "allowed_tools"}},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"priority": 1000},
        {"reasoning_effort": 1},
    ]
)
history = st.lists(
    st.sampled_from(
        [
            [{"role": "user", "content": "hi"}],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": call}],
                }
                | more
                for call in ({"name": "get", "arguments": '{"a": 1.0, "b": "\xe9"}'},)
                for more in ({}, {"reasoning_content": "\nwell\n"})
            ],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "d", "type": "function", "function": {"name": "now", "arguments": {"x": [None]}}}
                    ],
                }
            ],
            [{"role": "tool", "content": "5", "tool_call_id": "c"}],
            [{"role": "assistant", "content": "so", "reasoning": "r", "refusal": " no"}],
            [{"role": "developer", "content": "be"}],
        ]
    ),
    max_size=3,
).map(lambda found: [one for some in found for one in some])

OF_AGENTS: dict[str, st.SearchStrategy[Any]] = {
    "tools": tools,
    "stream": st.booleans(),
    "stream_options": st.sampled_from([{"include_usage": True}, {"include_usage": False}, {}]),
    "parallel_tool_calls": st.booleans(),
    "logprobs": st.booleans(),
    "enable_thinking": st.booleans(),
    "include_reasoning": st.booleans(),
    "separate_reasoning": st.booleans(),
    "thinking_budget": st.integers(1, 9),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "verbosity": st.sampled_from(["low", "medium"]),
    "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"x": [1, 2.5]}]),
    "model": st.sampled_from(["adapter", "scripted", None]),
    "priority": st.sampled_from([-3, 4, 0]),
    "n": st.sampled_from([1, 2]),
    "stop": st.sampled_from(["}", ["hm", "\n\n"], "</tool_call>", "k"]),
    "stop_token_ids": st.sampled_from([[107], [97, 101]]),
    "max_completion_tokens": st.one_of(st.integers(1, 90), st.just(-1)),
    "logit_bias": st.sampled_from([{"65": 5}, {}]),
    "receipt": st.sampled_from([True, True, None]),
}


def fails_alike(body: dict[str, Any]) -> bool:
    """Return true if a failing request fails alike on all servers; else the output before the failure depends on
    timing."""
    return not (body.get("stream") or body.keys() & {"stop", "stop_token_ids"})


@st.composite
def agent_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a chat request as agents and their libraries send it; its last message scripts the engine's reply."""
    body: dict[str, Any] = {"seed": draw(seeds), "max_tokens": 100}
    body["messages"] = [*draw(history), {"role": "user", "content": draw(answers)}]
    for name, values in OF_AGENTS.items():
        if draw(st.integers(0, 2)) == 0:
            body[name] = draw(values)
    if "stream_options" in body:
        body["stream"] = True
    if not fails_alike(body):
        body["messages"][-1]["content"] = body["messages"][-1]["content"].replace("fail:", "say:", 1)
    if body.get("logprobs") and draw(st.booleans()):
        body["top_logprobs"] = draw(st.integers(0, 3))
    if "tools" in body and draw(st.booleans()):
        body["tool_choice"] = draw(tool_choices)
    if draw(st.integers(0, 3)) == 0:
        body |= draw(forms)
    if draw(st.integers(0, 9)) == 0:
        body |= draw(bad_forms)
    return body


@st.composite
def scored_completions(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a completion request with log probabilities or structured output."""
    body: dict[str, Any] = {"seed": draw(seeds), "max_tokens": draw(max_tokens), "prompt": draw(answers)}
    if draw(st.integers(0, 2)):
        body["logprobs"] = draw(st.sampled_from([0, 1, 2, 5]))
    if draw(st.integers(0, 2)) == 0:
        body |= draw(forms)
    for name in ("stream", "stream_options", "n", "stop", "model", "priority", "logit_bias", "receipt"):
        if draw(st.integers(0, 2)) == 0:
            body[name] = draw(OF_AGENTS[name])
    if "stream_options" in body:
        body["stream"] = True
    if not fails_alike(body):
        body["prompt"] = body["prompt"].replace("fail:", "say:", 1)
    return body


_either = {**USUAL, **RARE, "seed": seeds, "max_tokens": max_tokens, "stream": st.booleans()}
inner_sampling = st.fixed_dictionaries(
    {}, optional={**_either, "max_new_tokens": max_tokens, "min_new_tokens": st.just(1), "sampling_seed": seeds}
).map(lambda found: dict([*found.items()][:3]))


def mutated(draw: st.DrawFn, body: dict[str, Any], path: str) -> Any:
    """Change a few fields of a body to invalid or rare values."""
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.integers(0, 8)):
            case 0 | 1:
                name = draw(st.sampled_from(sorted(RARE)))
                body[name] = draw(RARE[name])
            case 2:
                body[draw(st.sampled_from(sorted({*body, *USUAL, *RARE})))] = draw(odd_values)
            case 3:
                body.pop(draw(st.sampled_from(sorted(body))), None) if body else None
            case 4 if path == CHAT:
                body["messages"] = draw(odd_messages)
            case 4 if path == COMPLETION:
                body["prompt"] = draw(odd_prompts)
            case 4:
                body[draw(st.sampled_from(["prompt", "text", "input_ids"]))] = draw(odd_prompts)
                body["sampling_params"] = draw(st.one_of(inner_sampling, odd_values))
            case 5:
                body["stream_options"] = draw(
                    st.sampled_from([{}, None, {"include_usage": None}, {"continuous_usage_stats": True}, {"x": 1}, []])
                )
            case 6:
                body["stream"] = draw(st.sampled_from([True, False, None, 1, "true"]))
            case _:
                name, value = draw(at_edges(path))
                body[name] = value
    return body


def damaged(draw: st.DrawFn, text: bytes) -> bytes:
    at = draw(st.integers(0, len(text)))
    return draw(
        st.sampled_from(
            [
                text[:at],
                text[:at] + b"\xff" + text[at:],
                text[:at] + b"\x00" + text[at:],
                text[:at] + text[at + 1 :],
                b"\xef\xbb\xbf" + text,
                b" \n\t" + text + b"\n \r\n",
                text + b"x",
                text + text,
                b"[" + text + b"]",
                b"",
                text.replace(b'"', b"'"),
                text.replace(b"{", b"{ /* a */", 1),
                text.replace(b"}", b",}", 1),
            ]
        )
    )


def is_seeded(body: bytes) -> bool:
    """Return true if the response to a body is the same each time: it has a seed, or is refused as no JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict) or value.get("seed") is not None
