"""Fields, tools and contents that an API does not serve: refused by name, or accepted and named in a header. Nothing
that means something in one of our APIs is dropped without a word by another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.server.core import fields
from minisgl.server.core.errors import ApiError
from minisgl.server.core.fields import Body
from minisgl.server.core.unserved import MAX_NAMED, shown, unserved
from minisgl.server.routes import POSTS
from tests.helpers.server import Frontend, chat_body, prompt_text

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OLLAMA, OLLAMA_TEXT = "/api/chat", "/api/generate"
COMPLETION, INFILL = "/completion", "/infill"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: chat_body("say:ok"),
    TEXT: {"prompt": "say:ok"},
    GENERATE: {"prompt": "say:ok"},
    RESPONSES: {"input": "say:ok"},
    MESSAGES: {**chat_body("say:ok"), "max_tokens": 9},
    OLLAMA: {**chat_body("say:ok"), "stream": False},
    OLLAMA_TEXT: {"prompt": "say:ok", "stream": False},
    COMPLETION: {"prompt": "say:ok"},
}
GENERATING = (*ASKED, INFILL)


@pytest.fixture(scope="module")
def server(parsing_server: Frontend) -> Frontend:
    return parsing_server


def names_of(path: str) -> set[str]:
    """The fields of a route's bodies, by any name."""
    model: Any = POSTS[path][0]
    return {one.alias or name for name, one in model.model_fields.items()} | {*model.ALIASES}


ALL = sorted({name for path in GENERATING for name in names_of(path)} | fields.IGNORED.keys() | fields.OTHERS.keys())


@pytest.mark.parametrize("path", GENERATING)
def test_a_name_of_any_api_is_served_refused_or_named(path: str) -> None:
    model: type[Body] = POSTS[path][0]  # type: ignore[assignment]
    for name in ALL:
        try:
            named = unserved({name: object()}, model)
        except ApiError as error:
            assert error.body["error"]["param"] == name
        else:
            assert name in names_of(path) or named == [name], name
        if name not in fields.IGNORED and name not in names_of(path):
            with pytest.raises(ApiError):  # it changes the answer elsewhere
                unserved({name: object()}, model)
        assert unserved({name: None}, model) == []


@pytest.mark.parametrize("path", GENERATING)
def test_an_alias_leads_to_a_field_that_is_served(path: str) -> None:
    model: type[Body] = POSTS[path][0]  # type: ignore[assignment]
    for alias, name in model.ALIASES.items():
        assert name in model.model_fields and name not in model.NOT_YET and alias not in model.model_fields


IN_VAIN = {"user", "metadata", "store", "max_tool_calls"}
"""Fields that are there and have no effect, but where an answer returns them."""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path in ASKED
        for name in [*fields.IGNORED, "temprature", "provider"]
        if name not in names_of(path) or (name in IN_VAIN and path != RESPONSES)
    ],
)
def test_what_asks_for_less_is_accepted_and_named(http: httpx.Client, path: str, name: str) -> None:
    value: Any = {"store": True, "user": "u", "max_tool_calls": 3, "metadata": {"a": "b"}}.get(name, ["x"])
    answer = http.post(path, json={**ASKED[path], name: value})
    assert answer.status_code == 200, answer.text
    assert name in answer.headers["x-minisgl-ignored"].split(", ")
    if path in (OLLAMA, OLLAMA_TEXT):
        assert name in answer.json()["warning"]
    for nothing in fields.IGNORED.get(name, ()):
        quiet = http.post(path, json={**ASKED[path], name: nothing})
        assert quiet.status_code == 200 and "x-minisgl-ignored" not in quiet.headers, (nothing, quiet.text)


REFUSED: list[tuple[str, str, Any, str]] = [
    (CHAT, "system", "be", "messages"),
    (CHAT, "instructions", "be", "messages"),
    (CHAT, "previous_response_id", "resp_1", ""),
    (CHAT, "text", {"format": {"type": "json_object"}}, "response_format"),
    (CHAT, "output_config", {"effort": "low"}, "response_format"),
    (CHAT, "input", "x", "messages"),
    (CHAT, "reasoning", {"effort": "low"}, "reasoning_effort"),
    (CHAT, "thinking", {"type": "disabled"}, "enable_thinking"),
    (RESPONSES, "reasoning_effort", "low", "reasoning.effort"),
    (RESPONSES, "enable_thinking", False, "reasoning.effort"),
    (RESPONSES, "system", "be", "instructions"),
    (RESPONSES, "messages", [{}], "input"),
    (RESPONSES, "max_tokens", 5, "max_output_tokens"),
    (RESPONSES, "response_format", {"type": "json_object"}, "text.format"),
    (MESSAGES, "instructions", "be", "system"),
    (MESSAGES, "text", {"format": {"type": "json_object"}}, "output_config.format"),
    (MESSAGES, "response_format", {"type": "json_object"}, "output_config.format"),
    (MESSAGES, "reasoning_effort", "low", "output_config.effort"),
    (MESSAGES, "thread", {"type": "create"}, ""),
    (OLLAMA, "max_tokens", 5, "options.num_predict"),
    (OLLAMA, "temperature", 0, "options.temperature"),
    (OLLAMA, "stop", ["a"], "options.stop"),
    (OLLAMA, "response_format", {"type": "json_object"}, "format"),
    (OLLAMA, "tool_choice", "required", ""),
    (OLLAMA, "system", "be", "messages"),
    (OLLAMA, "prompt", "x", "messages"),
    (OLLAMA_TEXT, "messages", [{}], "prompt"),
    (OLLAMA_TEXT, "input", "x", "prompt"),
    (TEXT, "messages", [{}], "prompt"),
    (TEXT, "tools", [{}], ""),
]


@pytest.mark.parametrize(("path", "name", "value", "instead"), REFUSED)
def test_what_changes_the_answer_is_refused_with_the_name_that_does_it(
    http: httpx.Client, path: str, name: str, value: Any, instead: str
) -> None:
    answer = http.post(path, json={**ASKED[path], name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{name}: not supported by this version")
    assert f"use {instead} " in message if instead else "use " not in message


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *((CHAT, name, 2) for name in ("max_output_tokens", "num_predict", "n_predict")),
        *((MESSAGES, name, 2) for name in ("max_output_tokens", "max_completion_tokens")),
        *((RESPONSES, name, 2) for name in ("max_completion_tokens", "n_predict")),
        *((path, "stop_sequences", ["c"]) for path in (CHAT, TEXT, RESPONSES, MESSAGES, COMPLETION)),
    ],
)
def test_aliases_of_each_api_are_served(http: httpx.Client, path: str, name: str, value: Any) -> None:
    body = json.loads(json.dumps(ASKED[path]).replace("say:ok", "say:abcde"))
    if path == MESSAGES and "max" in name:
        del body["max_tokens"]
    answer = http.post(path, json={**body, name: value})
    assert answer.status_code == 200, answer.text
    assert '"ab"' in answer.text and "x-minisgl-ignored" not in answer.headers


def test_names_in_parts_are_named_without_places() -> None:
    chat: Any = POSTS[CHAT][0]
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "to": 1}] * 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"any": 1}, "colour": 1}}],
        "response_format": {"type": "text", "strictt": True},
    }
    assert unserved(body, chat) == [
        *("messages.content.cache_control", "messages.to", "tools.function.colour", "response_format.strictt")
    ]
    assert unserved({"sampling_params": {"temprature": 0}}, POSTS[GENERATE][0]) == ["sampling_params.temprature"]  # type: ignore[arg-type]


def test_a_header_has_usual_names_and_not_many() -> None:
    assert shown(["a", "b\r\nc: d", "é", "a"]) == "a, ?"
    model: Any = POSTS[CHAT][0]
    many = {f"x{i}": 1 for i in range(1000)}
    assert len(unserved(many, model)) == MAX_NAMED
    with pytest.raises(ApiError, match=r"^system: "):
        unserved({**many, "system": "be"}, model)


# ------------------------------------------------------------------------------------------- what cannot be shown

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}}
HIT = {"type": "search_result", "source": "s", "title": "Hits", "content": [{"type": "text", "text": "found it"}]}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
PAGE = {"type": "document", "title": "Page", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
SEARCH = [
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
]
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def of_result(*blocks: Any) -> dict[str, Any]:
    last = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [*blocks]}]}
    return {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [USE]}, last],
    }


def earlier(path: str, role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "hi"}, {"role": role, "content": [*parts], **more}]
    return {"messages" if path != RESPONSES else "input": turns, **({"max_tokens": 9} if path == MESSAGES else {})}


BEGUN = {"role": "assistant", "content": "{"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


LEFT = "left out: this model reads text only]"
HISTORIES: list[tuple[str, dict[str, Any], list[str], str]] = [
    (MESSAGES, of_result(PICTURE), [f"[image {LEFT}"], "messages.content.content.image"),
    (MESSAGES, of_result(text("shot"), PICTURE), ["shot", f"[image {LEFT}"], "messages.content.content.image"),
    (
        MESSAGES,
        of_result(HIT, {"type": "tool_reference", "tool_name": "f"}),
        ["Hits", "found it", "[tool_reference"],
        "",
    ),
    (MESSAGES, earlier(MESSAGES, "user", PDF), [f"[document {LEFT}"], "messages.content.document"),
    (MESSAGES, earlier(MESSAGES, "user", PAGE, text("read")), ["Page", "words", "read"], ""),
    (MESSAGES, earlier(MESSAGES, "assistant", *SEARCH, text("so")), ["so"], "messages.content.server_tool_use"),
    (MESSAGES, earlier(MESSAGES, "user", {"type": "of_tomorrow"}, text("b")), ["[of_tomorrow", "b"], ""),
    (CHAT, earlier(CHAT, "user", text("look"), URL), ["look", f"[image_url {LEFT}"], "messages.content.image_url"),
    (CHAT, earlier(CHAT, "user", URL), [f"[image_url {LEFT}"], ""),
    (CHAT, earlier(CHAT, "tool", URL, tool_call_id="t"), [f"[image_url {LEFT}"], ""),
    (CHAT, earlier(CHAT, "user", {"type": "input_audio", "input_audio": {}}), ["[input_audio"], ""),
    (CHAT, earlier(CHAT, "assistant", {"type": "thinking", "thinking": "hm"}, text("so")), ["so"], ""),
    (
        RESPONSES,
        earlier(RESPONSES, "user", {"type": "input_image", "image_url": "x"}),
        ["[input_image"],
        "input.content.input_image",
    ),
    (
        RESPONSES,
        earlier(RESPONSES, "user", {"type": "input_file", "file_id": "x"}, text("b")),
        ["[input_file", "b"],
        "",
    ),
    (RESPONSES, {"input": [{"type": "mcp_list_tools", "tools": []}]}, [], "input.mcp_list_tools"),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
            ]
        },
        ["[input_image"],
        "input.output.input_image",
    ),
    (
        OLLAMA,
        {"messages": [{"role": "user", "content": "look", "images": ["AAAA"]}]},
        ["[image", "look"],
        "messages.images",
    ),
]


@pytest.mark.parametrize(("path", "body", "there", "named"), HISTORIES)
def test_a_history_with_what_cannot_be_shown_goes_on(
    http: httpx.Client, server: Frontend, path: str, body: dict[str, Any], there: list[str], named: str
) -> None:
    turns = "input" if path == RESPONSES else "messages"
    before = len(server.engine.requests("say:on"))
    if body[turns][-1]["role"] != "assistant" if "role" in body[turns][-1] else True:
        body = {**body, turns: [*body[turns], {"role": "assistant", "content": "well"}]}
    answer = http.post(path, json={**body, turns: [*body[turns], {"role": "user", "content": "say:on"}]})
    assert answer.status_code == 200, answer.text
    prompt = prompt_text(server.engine.requests("say:on")[before])
    places = [prompt.index(words) for words in there]
    assert places == sorted(places) and "iVBOR" not in prompt and "srvtoolu" not in prompt and "hm" not in prompt
    assert named in answer.headers.get("x-minisgl-ignored", "")
    if not there:
        assert "left out" not in prompt


BESIDE: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [URL, text("say:on")]}]}, "messages.content.image_url"),
    (
        MESSAGES,
        {"max_tokens": 9, "messages": [{"role": "user", "content": [text("look"), PICTURE, text("say:on")]}]},
        "messages.content.image",
    ),
    (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "say:on"}],
                }
            ]
        },
        "input.content.input_image",
    ),
    (OLLAMA, {"messages": [{"role": "user", "content": "say:on", "images": ["AAAA"]}]}, "messages.images"),
]


@pytest.mark.parametrize(("path", "body", "named"), BESIDE)
def test_a_picture_beside_text_in_a_last_message_is_a_note(
    http: httpx.Client, server: Frontend, path: str, body: dict[str, Any], named: str
) -> None:
    """Claude Code repeats a message that was refused within all later ones, so an error would end its session."""
    before = len(server.engine.requests("say:on"))
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-minisgl-ignored"] == named
    assert LEFT in prompt_text(server.engine.requests("say:on")[before])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [URL]}]}, "messages.0.content.0.type"),
        (CHAT, {"messages": [{"role": "user", "content": [URL]}, {"role": "system", "content": "s"}]}, "messages.0"),
        (MESSAGES, {"max_tokens": 9, "messages": [*earlier(MESSAGES, "user", PICTURE)["messages"], BEGUN]}, "messages"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": [PICTURE, PDF]}]}, "messages"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (OLLAMA, {"messages": [{"role": "user", "images": ["AAAA"]}]}, "messages.0.images"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages.0.content.0.type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "a b"}]}]}, "messages.0.content.0.type"),
        (MESSAGES, {"max_tokens": 9, "system": [PICTURE], "messages": [{"role": "user", "content": "x"}]}, "system.0"),
    ],
)
def test_a_question_of_nothing_that_can_be_shown_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(param)


OWN = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
SERVERS = ["web_search", "web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp", "file_search"]


@pytest.mark.parametrize("kind", SERVERS)
def test_tools_of_servers_are_left_out_by_one_rule(http: httpx.Client, server: Frontend, kind: str) -> None:
    hosted = {"type": kind, "name": kind.partition("_2")[0]}
    for path, own in ((CHAT, FUNCTION), (MESSAGES, OWN), (RESPONSES, {"type": "function", "name": "f"})):
        before = len(server.engine.requests("say:ok"))
        answer = http.post(path, json={**ASKED[path], "tools": [hosted, own]})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-minisgl-ignored"] == f"tools.{hosted['name']}"
        prompt = prompt_text(server.engine.requests("say:ok")[before])
        assert hosted["name"] not in prompt and '"f"' in prompt
        required: Any = {"type": "any"} if path == MESSAGES else "required"
        assert http.post(path, json={**ASKED[path], "tools": [hosted], "tool_choice": required}).status_code == 400
        wrong = {**own, "input_schema": 5} if path == MESSAGES else {**own, "function": {"name": "a b"}, "name": "a b"}
        error = http.post(path, json={**ASKED[path], "tools": [hosted, wrong]}).json()["error"]
        assert error["message"].startswith("tools.1."), error


# -------------------------------------------------------------------------------------------------- lengths, texts


@pytest.mark.parametrize(
    ("path", "name", "least"),
    [
        (CHAT, "max_tokens", -1),
        (CHAT, "max_completion_tokens", 1),
        (TEXT, "max_tokens", -1),
        (GENERATE, "max_tokens", -1),
        (COMPLETION, "n_predict", -1),
        (MESSAGES, "max_tokens", 0),
        (RESPONSES, "max_output_tokens", 1),
        (RESPONSES, "max_completion_tokens", 1),
        (CHAT, "max_output_tokens", 1),
        (CHAT, "num_predict", -1),
    ],
)
def test_the_least_length_is_the_documented_one(http: httpx.Client, path: str, name: str, least: int) -> None:
    for length in range(-2, 3):
        for stream in (False, True):
            answer = http.post(path, json={**ASKED[path], name: length, "stream": stream})
            assert answer.status_code == (200 if length >= least else 400), (length, answer.text)
            assert length >= least or name in answer.json()["error"]["message"].split()[0]


def test_a_message_of_no_tokens_has_no_content(http: httpx.Client) -> None:
    found = http.post(MESSAGES, json={**ASKED[MESSAGES], "max_tokens": 0}).json()
    assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_a_prompt_that_is_too_long_is_told_in_each_api_s_words_and_counted(http: httpx.Client) -> None:
    long = "word " * 900
    error = http.post(MESSAGES, json={**ASKED[MESSAGES], "messages": [{"role": "user", "content": long}]}).json()
    count = http.post(f"{MESSAGES}/count_tokens", json={"messages": [{"role": "user", "content": long}]})
    assert count.status_code == 200 and count.json()["input_tokens"] > 4500
    assert error["error"]["message"] == f"prompt is too long: {count.json()['input_tokens']} tokens > 2047 maximum"
    for body in ({"input": long}, {"input": long, "truncation": "auto"}):
        told = http.post(RESPONSES, json=body).json()["error"]
        assert told["message"].endswith("shorten input.") and " input has " in told["message"]
        counted = http.post(f"{RESPONSES}/input_tokens", json=body)
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 4500
    for body in ({"prompt": long}, {"content": long}, {"messages": [{"role": "user", "content": long}]}):
        counted = http.post("/tokenize", json=body)
        assert counted.status_code == 200 and counted.json()["count"] == len(counted.json()["tokens"]) > 4400
    for path, name in ((OLLAMA_TEXT, "prompt"), (TEXT, "prompt"), (COMPLETION, "prompt"), (CHAT, "messages")):
        body = chat_body(long) if path == CHAT else {"prompt": long}
        told = http.post(path, json=body).json()["error"]
        assert f"{name} has" in (told if isinstance(told, str) else told["message"])


HALVES = [rb"x\udfff", rb"\ud83d", rb"\uD83D\u0020", rb"\\\ud800", b"\xed\xa0\x80"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("path", ASKED)
def test_half_a_character_is_replaced(http: httpx.Client, server: Frontend, path: str, half: bytes) -> None:
    body = json.dumps(ASKED[path]).encode().replace(b"say:ok", rb"\\ud800 \ud83d\ude00 " + half + b" say:ok")
    before = len(server.engine.requests("say:ok"))
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    prompt = prompt_text(server.engine.requests("say:ok")[before])
    assert "\\ud800 \U0001f600 " in prompt and "�" in prompt


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/v1/responses", "/v1/responses"),
        ("/messages", "/v1/messages"),
        ("/responses", "/v1/responses"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/nothing", None),
        ("/v1/nothing", None),
    ],
)
def test_unknown_path_suggests_the_route(http: httpx.Client, path: str, right: str | None) -> None:
    answer = http.post(path, json={})
    found = answer.json()
    message = found["error"] if isinstance(found["error"], str) else found["error"]["message"]
    assert answer.status_code == 404 and (
        message.endswith(f": the path is {right}") if right else "path is" not in message
    )
    assert ("type" in found) == ("/messages" in path) and isinstance(found["error"], str) == ("/api/" in path)


# ---------------------------------------------------------------------------------------------------------- Ollama


@pytest.mark.parametrize("path", [OLLAMA, OLLAMA_TEXT])
@pytest.mark.parametrize(
    "more",
    [{"message": "x"}, {"promt": "x"}, {"tools": [FUNCTION]}, {"system": "x"}, {"format": "json"}, {"raw": True}],
)
def test_only_a_body_of_nothing_else_loads(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    loads = {
        "stream": False,
        "keep_alive": 5,
        "options": {"num_ctx": 5},
        "prompt" if path == OLLAMA_TEXT else "messages": None,
    }
    answer = http.post(path, json={**loads, **more})
    assert answer.status_code == 400 and answer.json()["error"].startswith(next(iter(more))), answer.text
    for empty in ({}, dict.fromkeys(more), {"raw": False, "format": ""}):
        assert http.post(path, json={**loads, **empty}).json()["done_reason"] == "load"


@pytest.mark.parametrize(("given", "vectors"), [("", []), ([], []), (["", ""], [[], []])])
def test_a_text_of_nothing_has_an_empty_vector(http: httpx.Client, given: Any, vectors: Any) -> None:
    answer = http.post("/api/embed", json={"input": given})
    assert answer.status_code == 200 and answer.json()["embeddings"] == vectors, answer.text
    if given == "":
        assert http.post("/api/embeddings", json={"prompt": given}).json() == {"embedding": []}


# ---------------------------------------------------------------------------------------------------- docs/clients.md


def verdict(path: str, name: str) -> str:
    try:
        named = unserved({name: object()}, POSTS[path][0])  # type: ignore[arg-type]
    except ApiError:
        return "400"
    return "named" if named else "yes"


def test_the_page_of_clients_has_what_becomes_of_their_fields() -> None:
    page = Path("docs/clients.md").read_text(encoding="utf-8")
    head, _, *rows = page.partition("<!-- fields -->")[2].partition("<!-- /fields -->")[0].strip().splitlines()
    assert len(rows) > 25 and head.count("|") == 9
    for row in rows:
        names, sent_by, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        assert sent_by
        for name in names.split(", "):
            found = [verdict(path, name.strip("`")) for path in (CHAT, MESSAGES, RESPONSES, OLLAMA, TEXT, COMPLETION)]
            assert found == cells, name
