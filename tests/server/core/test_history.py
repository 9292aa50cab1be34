"""Histories of all chat APIs, as the chat templates get them: in the order in which the client wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minisgl.server.apis.anthropic.body import MessagesRequest
from minisgl.server.apis.anthropic.endpoint import to_chat as chat_of_messages
from minisgl.server.apis.ollama.body import OllamaChatRequest
from minisgl.server.apis.ollama.endpoint import conversation_of
from minisgl.server.apis.responses.body import ResponsesRequest
from minisgl.server.apis.responses.endpoint import kept_items, messages_of
from minisgl.server.apis.responses.endpoint import to_chat as chat_of_responses
from minisgl.server.apis.responses.tools import GivenTools
from minisgl.server.core.bodies import ChatRequest
from minisgl.server.core.history import History
from minisgl.server.core.request import checked
from minisgl.server.core.tools import Parsing
from minisgl.tokenizer import Tokenizer
from tests.helpers.chat_templates import OURS
from tests.helpers.server import frontend

Turns = Sequence[tuple[str, str]]
"""Kinds (of `KINDS` of an API) and texts. A call is of the function that its text names; results follow their calls."""


def _chat(turns: Turns) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    for kind, text in turns:
        if kind == "call":
            function = {"name": text, "arguments": ""}
            messages.append(
                {"role": "assistant", "tool_calls": [{"id": text, "type": "function", "function": function}]}
            )
        elif kind == "result":
            messages.append({"role": "tool", "tool_call_id": text, "content": f"of {text}"})
        else:
            messages.append({"role": kind, "content": text})
    return checked({"messages": messages}, ChatRequest)


def _messages(turns: Turns) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    for kind, text in turns:
        if kind == "call":
            messages.append(
                {"role": "assistant", "content": [{"type": "tool_use", "id": text, "name": text, "input": {}}]}
            )
        elif kind == "result":
            block = {"type": "tool_result", "tool_use_id": text, "content": f"of {text}"}
            messages.append({"role": "user", "content": [block]})
        else:
            messages.append({"role": kind, "content": text})
    return chat_of_messages(checked({"max_tokens": 9, "messages": messages}, MessagesRequest))


def _responses(turns: Turns) -> ChatRequest:
    items: list[dict[str, Any]] = []
    for kind, text in turns:
        if kind == "call":
            items.append({"type": "function_call", "call_id": text, "name": text, "arguments": ""})
        elif kind == "result":
            items.append({"type": "function_call_output", "call_id": text, "output": f"of {text}"})
        else:
            items.append({"type": "message", "role": kind, "content": text})
    asked = checked({"input": items}, ResponsesRequest)
    kept = [item for item in kept_items(asked.input or "") if isinstance(item, dict)]
    return chat_of_responses(asked, GivenTools(asked), messages_of(kept))


def _ollama(turns: Turns) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    for kind, text in turns:
        if kind == "call":
            messages.append({"role": "assistant", "tool_calls": [{"function": {"name": text}}]})
        elif kind == "result":
            messages.append({"role": "tool", "tool_name": text, "content": f"of {text}"})
        else:
            messages.append({"role": kind, "content": text})
    asked = checked({"messages": messages}, OllamaChatRequest)
    return checked(conversation_of(Parsing(Tokenizer.echo()), asked), ChatRequest)


APIS: dict[str, Callable[[Turns], ChatRequest]] = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "ollama": _ollama,
}
CASES: dict[str, tuple[str, Turns, str]] = {
    "a system message behind an answer": (
        "strict",
        [("user", "one"), ("assistant", "two"), ("system", "shortly"), ("user", "three")],
        "[user]one[assistant]two[user]shortly[user]three[assistant]",
    ),
    "two leading system messages": (
        "strict",
        [("system", "a"), ("system", "b"), ("user", "q")],
        "[system]a\n\nb[user]q[assistant]",
    ),
    "a call without arguments": (
        "strict",
        [("user", "q"), ("call", "f"), ("result", "f")],
        "[user]q[assistant]<call f></call>[result]of f[assistant]",
    ),
    "users in a row": ("turns", [("user", "a"), ("user", "b")], "[user]a\n\nb[model]"),
    "no system role": ("bare", [("system", "s"), ("user", "q")], "[user]s\n\nq[model]"),
    "a result and a text": (
        "nine",
        [("user", "q"), ("call", "abcdefghi"), ("result", "abcdefghi"), ("user", "p")],
        '[INST]q[/INST][CALLS]{"name": "abcdefghi", "arguments": {}} ID[RESULT]of abcdefghi</s>[INST]p[/INST]',
    ),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("name", "turns", "prompt"), CASES.values(), ids=CASES)
def test_every_api_brings_its_order_to_the_template(api: str, name: str, turns: Turns, prompt: str) -> None:
    chat = APIS[api](turns)
    messages = [message.for_template() for message in chat.messages or ()]
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    shown = OURS[name].render(messages)
    if "ID" in prompt:  # Ollama's calls have none, and get one
        [prompt] = (prompt.replace("ID", shown.partition("}} ")[2][:9]) for _ in ids)
    assert shown == prompt


THOUGHTS: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "thoughts between calls": (
        [("reasoning", "a"), ("call", "f"), ("reasoning", "b"), ("call", "g")],
        ["a||f", "b||g"],
    ),
    "a text behind a call": ([("call", "f"), ("text", "t")], ["||f", "|t|"]),
    "a text before a call": ([("text", "t"), ("call", "f")], ["|t|f"]),
    "calls at once": ([("reasoning", "a"), ("text", "t"), ("call", "f"), ("call", "g")], ["a|t|f,g"]),
    "a thought behind a text": ([("text", "t"), ("reasoning", "a"), ("call", "f")], ["|t|", "a||f"]),
    "a blank text behind a call": ([("call", "f"), ("text", "\n")], ["||f"]),
}


@pytest.mark.parametrize(("pieces", "messages"), THOUGHTS.values(), ids=THOUGHTS)
def test_an_answer_comes_back_in_the_order_of_its_pieces(pieces: list[tuple[str, str]], messages: list[str]) -> None:
    blocks: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = []
    for kind, text in pieces:
        match kind:
            case "reasoning":
                blocks.append({"type": "thinking", "thinking": text})
                items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]})
            case "text":
                blocks.append({"type": "text", "text": text})
                items.append({"type": "message", "role": "assistant", "content": text})
            case _:
                blocks.append({"type": "tool_use", "id": text, "name": text, "input": {"a": 1}})
                items.append({"type": "function_call", "call_id": text, "name": text, "arguments": '{"a":1}'})
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": blocks}]}
    of_messages = chat_of_messages(checked(body, MessagesRequest)).messages or []
    asked = checked({"input": [{"role": "user", "content": "q"}, *items]}, ResponsesRequest)
    kept = [item for item in kept_items(asked.input or "") if isinstance(item, dict)]
    of_responses = chat_of_responses(asked, GivenTools(asked), messages_of(kept)).messages or []
    for found in (of_messages, of_responses):
        assert [summary(message.for_template()) for message in found[1:]] == messages


def summary(message: dict[str, Any]) -> str:
    called = ",".join(call["function"]["name"] for call in message.get("tool_calls", ()))
    assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in message.get("tool_calls", ()))
    return f"{message.get('reasoning_content', '')}|{message['content']}|{called}"


def test_consecutive_texts_join_only_with_may_append() -> None:
    parts = [{"type": "text", "text": "a"}], [{"type": "text", "text": "b"}]
    together, apart = History(), History()
    for part in parts:
        together.say(part, may_append=True)
        apart.say(part)
    assert [message["content"] for message in together.done()] == [[*parts[0], *parts[1]]]
    assert [message["content"] for message in apart.done()] == ["a", "b"]


@pytest.mark.parametrize("call_id", [[1], {"a": 1}, 7, None])
def test_an_id_of_any_kind_is_no_error_of_ours(call_id: object) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [{"role": "user", "content": "say:x"}]
    talk += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    talk += [{"role": "tool", "tool_call_id": "c1", "content": None}]
    with frontend() as server, server.http() as http:
        assert http.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 2}).status_code in (200, 400)


def test_texts_have_the_names_of_either_api() -> None:
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "say:kept"}]}]
    with frontend() as server, server.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": talk})
        assert answer.status_code == 200 and "kept" in answer.json()["choices"][0]["message"]["content"]


TEXTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a text": (
        {"type": "document", "title": "Page", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
        ["Page", "words"],
    ),
    "blocks": (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "words"}]}},
        ["words"],
    ),
    "a text as content": ({"type": "document", "source": {"type": "content", "content": "words"}}, ["words"]),
    "a hit": (
        {
            "type": "search_result",
            "source": "https://a.example",
            "title": "Hit",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            "citations": {"enabled": True},
        },
        ["Hit", "one", "two"],
    ),
}


@pytest.mark.parametrize("place", ["last", "history", "result", "result in history"])
@pytest.mark.parametrize(("block", "words"), TEXTS.values(), ids=TEXTS)
def test_texts_of_documents_and_hits_reach_the_template(block: dict[str, Any], words: list[str], place: str) -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    blocks = [{"type": "tool_result", "tool_use_id": "t", "content": [block]}] if "result" in place else [block]
    messages = [{"role": "user", "content": "q"}, call] if "result" in place else []
    messages += [{"role": "user", "content": blocks}]
    if "history" in place:
        messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "p"}]
    chat = chat_of_messages(checked({"max_tokens": 9, "messages": messages}, MessagesRequest))
    prompt = OURS["open"].render([message.for_template() for message in chat.messages or ()])
    assert "left out" not in prompt
    places = [prompt.index(word) for word in words]
    assert places == sorted(places)
