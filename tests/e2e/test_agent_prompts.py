"""Long conversations of agents: 20,000 tokens of instructions and tools, 30 turns, over each API. Each turn computes
what is new, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.e2e import serving
from tests.helpers.seconds import WAIT_S

INSTRUCTIONS = " ".join(f"Rule {i} of many." for i in range(800))
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "Where it lies. " * 8}}}
TOOLS = [{"name": f"tool_{i}", "description": "Does what its name says.", "parameters": PARAMETERS} for i in range(24)]
NUM_TURNS = 30
PAGE_SIZE = 16  # what is found are whole pages
Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags = ("--engine", "echo", "--max-seq-len", "40000", "--num-pages", "6000", "--page-size", str(PAGE_SIZE))
    with (
        serving(*flags, "--tool-call-parser", "hermes") as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(http: httpx.Client, said: Said) -> tuple[str, int, int]:
    """What the model answers, and tokens of the prompt: all, and those found in the cache."""
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    messages = [{"role": "system", "content": INSTRUCTIONS}, *said]
    found = post(http, "/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 8})
    usage = found["usage"]
    text = found["choices"][0]["message"]["content"] or ""
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def responses(http: httpx.Client, said: Said) -> tuple[str, int, int]:
    tools = [{"type": "namespace", "name": "mcp__box__", "tools": [{"type": "function", **tool} for tool in TOOLS]}]
    body = {"instructions": INSTRUCTIONS, "input": said, "tools": tools, "max_output_tokens": 8, "store": False}
    found = post(http, "/v1/responses", body)
    usage = found["usage"]
    text = "".join(part["text"] for item in found["output"] for part in item.get("content", ()))
    return text, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def messages(http: httpx.Client, said: Said) -> tuple[str, int, int]:
    tools = [{"name": one["name"], "description": one["description"], "input_schema": PARAMETERS} for one in TOOLS]
    body = {"system": INSTRUCTIONS, "messages": said, "tools": tools, "max_tokens": 8}
    found = post(http, "/v1/messages", body)
    usage = found["usage"]
    cached = usage["cache_read_input_tokens"]
    return "".join(one["text"] for one in found["content"]), usage["input_tokens"] + cached, cached


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_each_turn_computes_what_is_new(
    http: httpx.Client, ask: Callable[[httpx.Client, Said], tuple[str, int, int]]
) -> None:
    said: Said = []
    before = total = hits = 0
    for turn in range(NUM_TURNS):
        said.append({"role": "user", "content": f"{ask.__name__}: turn {turn}, please go on."})
        text, num_prompt, num_cached = ask(http, said)
        said.append({"role": "assistant", "content": text or "."})
        if turn:
            assert before // PAGE_SIZE * PAGE_SIZE <= num_cached < num_prompt, (turn, before, num_cached, num_prompt)
            total, hits = total + num_prompt, hits + num_cached
        else:
            assert num_prompt > 20_000
        before = num_prompt
    assert hits / total >= 0.99
