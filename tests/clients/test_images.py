"""Client libraries, each in an environment of its own (`make client-test`), send a picture to a tiny model that sees:
in a message of the user and, if the library forwards it, in a tool result. All of them send the same picture, so that
the vision tower computes it once and later prompts take its pages from the cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.clients import node_command, python_command, report
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.sight import data_url, in_base64, png
from tests.helpers.vision_chat import talking

CLIENT_S = 300  # a client that takes longer has failed
TOKENS = 31 * 31
"""Tokens of the picture. They outnumber the other tokens of each prompt, so a prompt with fewer than twice as many has
the picture once, and not as base64."""
BEFORE = "Look at this picture."  # as in programs/images.py


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("picture") / "picture.png"
    file.write_bytes(png(31 * 8, 31 * 8))
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start the server. Agents need an end-of-sequence token, for grammars, and a format of tool calls."""
    folder, state = talking(tmp_path_factory.mktemp("seer"), eos_token_id=256), tmp_path_factory.mktemp("state")
    with serving(
        *("--model", str(folder), "--served-model-name", "seer", "--tool-call-parser", "hermes"),
        *("--state-dir", str(state), "--num-threads", "1"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(url: str, picture: Path) -> Iterator[httpx.Client]:
    """Return a connection to the server after a first chat request with the picture."""
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        parts = [
            {"type": "text", "text": BEFORE},
            {"type": "image_url", "image_url": {"url": data_url(picture.read_bytes())}},
        ]
        body = {"model": "seer", "max_tokens": 8, "messages": [{"role": "user", "content": parts}]}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["image_tokens"] == TOKENS
        yield client


def counts(http: httpx.Client) -> tuple[int, int]:
    """Return how many images the tower has computed and how many prompt tokens were cached since the server started."""

    def read() -> dict[str, int]:
        found = re.findall(r"^minisgl:(\w+)(?:\{.*\})? (\d+)(?:\.0)?$", http.get("/metrics").text, re.M)
        return {name: int(value) for name, value in found}

    until(lambda: (now := read())["prompt_tokens_total"] == now["prompt_length_tokens_sum"], "the engine's counts")
    now = read()
    return now["image_embeddings_computed_total"], now["cached_tokens_total"]


def check(http: httpx.Client, show: Callable[[], list[int]], count: int) -> None:
    """Check that `show` sends `count` prompts with the picture, which the cache serves. It returns their lengths in
    tokens."""
    tower, cached = counts(http)
    tokens = show()
    assert len(tokens) == count and all(TOKENS < one < 2 * TOKENS for one in tokens), tokens
    tower_after, cached_after = counts(http)
    assert tower_after == tower and cached_after >= cached + TOKENS


def python(place: str, name: str) -> Callable[[], list[str]]:
    return lambda: [*python_command(place), "programs/images.py", name]


def node(name: str) -> Callable[[], list[str]]:
    return lambda: [*node_command("images.mjs"), name]


# client, its prompts with the picture, what runs it
PROGRAMS: list[tuple[str, int, Callable[[], list[str]]]] = [
    ("langchain", 6, python("langchain", "langchain")),
    ("langchain-ollama", 3, python("ollama", "langchain_ollama")),
    ("ollama", 5, python("ollama", "ollama")),
    ("ollama-js", 4, node("ollama_js")),
    ("litellm", 8, python("litellm", "litellm")),
    ("llama-index", 1, python("llama-index", "llama_index")),
    ("instructor", 1, python("instructor", "instructor")),
    ("smolagents", 1, python("smolagents", "smolagents")),
    ("llm", 1, python("llm", "llm")),
    ("openai-agents", 3, python("openai-agents", "openai_agents")),
    ("pydantic-ai", 4, python("pydantic-ai", "pydantic_ai")),
    ("openai-node", 2, node("openai_node")),
    ("vercel", 6, node("vercel")),
]


@pytest.mark.timeout(CLIENT_S)
@pytest.mark.parametrize(("count", "command"), [one[1:] for one in PROGRAMS], ids=[one[0] for one in PROGRAMS])
def test_a_picture_of_a_client_is_seen(
    http: httpx.Client, url: str, picture: Path, count: int, command: Callable[[], list[str]]
) -> None:
    check(http, lambda: [*map(int, report([*command(), str(picture)], url))], count)


def test_a_picture_in_open_webui_s_requests_is_seen(http: httpx.Client, picture: Path) -> None:
    """The test sends the streamed bodies of Open WebUI's two connections, because its environment takes 7.3 GB."""
    data = picture.read_bytes()
    parts = [{"type": "text", "text": BEFORE}, {"type": "image_url", "image_url": {"url": data_url(data)}}]
    chat = {"messages": [{"role": "user", "content": parts}], "stream_options": {"include_usage": True}}
    message = {"role": "user", "content": BEFORE, "images": [in_base64(data)]}
    ollama = {"messages": [message], "options": {"num_predict": 8}, "keep_alive": "5m"}

    def show() -> list[int]:
        more = {"model": "seer", "stream": True}
        lines = http.post("/v1/chat/completions", json={**chat, **more, "max_tokens": 8}).text.split("\n\n")
        last = http.post("/api/chat", json={**ollama, **more}).text.splitlines()[-1]
        usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
        return [usage["prompt_tokens"], json.loads(last)["prompt_eval_count"]]

    check(http, show, 2)
