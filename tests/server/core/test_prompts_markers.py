"""Texts of requests to all chat APIs stay texts: their prompts have no control ids that the template did not make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.tokenizer.echo import ECHO_BOS, ECHO_EOS
from tests.helpers.scripted_engine import prompt_ids, prompt_text
from tests.helpers.server import MODEL, Frontend, frontend

FIRST_CONTROL = 256


@pytest.fixture(scope="module", params=["python", "rust"])
def server(request: pytest.FixtureRequest) -> Iterator[Frontend]:
    with frontend(front_end=request.param, max_seq_len=4096) as running:
        yield running


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def bodies(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: the path, and a body that has the text in all of its fields which a template may show."""
    tool = {"name": "f", "description": text, "parameters": {"type": "object", "properties": {text: {"enum": [text]}}}}
    schema = {"type": "object", "properties": {text: {"enum": [text]}}}
    history = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": part} for part in (text[:4], text[4:], text)]},
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": text,
            "tool_calls": [call("f", f'{{"a": "{text}"}}')],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": text},
        {"role": "user", "content": f"{text}say:ok"},
    ]
    claude = [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": text}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": text}]},
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"{text}say:ok"},
    ]
    items = [
        {"role": "user", "content": text},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": f'{{"a": "{text}"}}'},
        {"type": "function_call_output", "call_id": "call_1", "output": text},
        {"role": "user", "content": f"{text}say:ok"},
    ]
    functions = [{"type": "function", "function": tool}]
    return {
        "chat": ("/v1/chat/completions", {"messages": history, "tools": functions}),
        "messages": (
            "/v1/messages",
            {
                "messages": claude,
                "system": text,
                "max_tokens": 9,
                "tools": [{"name": "f", "description": text, "input_schema": schema}],
            },
        ),
        "responses": (
            "/v1/responses",
            {"input": items, "instructions": text, "tools": [{"type": "function", **tool, "strict": False}]},
        ),
        "ollama": (
            "/api/chat",
            {"model": "", "messages": [{"role": "user", "content": f"{text}say:ok"}], "stream": False},
        ),
        "ollama, one text": (
            "/api/generate",
            {"model": "", "prompt": f"{text}say:ok", "system": text, "stream": False},
        ),
    }


@pytest.mark.parametrize("name", bodies(""))
@pytest.mark.parametrize("marker", [ECHO_BOS, ECHO_EOS])
def test_texts_of_a_request_make_no_control_ids(http: httpx.Client, server: Frontend, name: str, marker: str) -> None:
    def controls(text: str) -> list[int]:
        path, body = bodies(text)[name]
        answer = http.post(path, json={**body, **({"model": MODEL} if "model" in body else {})})
        assert answer.status_code == 200, answer.text
        asked = server.engine.wait_for_request(f"{text}say:ok")
        assert text in prompt_text(asked)
        return [i for i in prompt_ids(asked) if i >= FIRST_CONTROL]

    assert controls(f"{name}{marker}{marker}") == controls(f"{name}word{len(marker)}")


def test_counting_and_texts_without_a_template(http: httpx.Client) -> None:
    """`/tokenize` counts as the chat does; a prompt that no template makes has the markers that it spells."""
    message = {"role": "user", "content": f"a{ECHO_EOS}b"}
    ids = http.post("/tokenize", json={"messages": [message]}).json()["tokens"]
    plain = http.post("/tokenize", json={"messages": [{**message, "content": "ab"}]}).json()["tokens"]
    assert [i for i in ids if i >= FIRST_CONTROL] == [i for i in plain if i >= FIRST_CONTROL]
    assert len(ids) == len(plain) + len(ECHO_EOS)
    assert (
        len(http.post("/tokenize", json={"prompt": f"a{ECHO_EOS}b", "add_special_tokens": False}).json()["tokens"]) == 3
    )
    shown = http.post("/apply-template", json={"messages": [message]}).json()["prompt"]
    assert f"a{ECHO_EOS}b" in shown
