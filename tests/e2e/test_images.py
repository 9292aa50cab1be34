"""A tiny model that sees behind a real server: an image is computed once, whichever API it comes by, and its pages are
shared; one other pixel shares the text before it only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.image_files import encoded, picture
from tests.helpers.seconds import WAIT_S
from tests.helpers.sight import data_url, in_base64
from tests.helpers.vision_chat import talking

PAGE = 16
BEFORE = "Look at these pictures, one after the other, and say what they have in common. "
"""Some pages of text in front of an image."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking(tmp_path_factory.mktemp("seer"))


@pytest.fixture(scope="module")
def server(front_end: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("state")
    with serving(
        *("--model", str(folder), "--served-model-name", "seer", "--frontend", front_end),
        *("--state-dir", str(state), "--max-images", "4", "--num-threads", "1"),
    ) as running:
        yield running


def computed(http: httpx.Client) -> int:
    """Return how many images the tower has computed, once the engine's counts have all prompts that were answered."""

    def read(name: str) -> int:
        found = re.search(rf"^minisgl:{name}(?:\{{.*\}})? (\S+)$", http.get("/metrics").text, re.M)
        assert found is not None, name
        return int(float(found[1]))

    until(lambda: read("prompt_tokens_total") == read("prompt_length_tokens_sum"), "the engine's counts")
    return read("image_embeddings_computed_total")


def fresh(seed: int, width: int = 160, height: int = 120) -> bytes:
    return encoded(picture(width, height, seed))


def chat(client: openai.OpenAI, data: bytes, words: str, **more: Any) -> Any:
    content: Any = [
        {"type": "text", "text": BEFORE},
        {"type": "image_url", "image_url": {"url": data_url(data)}},
        {"type": "text", "text": words},
    ]
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="seer", messages=messages, max_tokens=6, temperature=0, **more)


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=WAIT_S, max_retries=0)


def test_one_image_by_two_apis_is_computed_once(
    http: httpx.Client, client: openai.OpenAI, server: ServerProcess
) -> None:
    data, before = fresh(1), computed(http)
    first = chat(client, data, "Which colour?")
    tokens = first.usage.prompt_tokens_details.image_tokens
    assert computed(http) == before + 1 and tokens == 15 * 20
    assert first.usage.prompt_tokens_details.cached_tokens < len(BEFORE) + 8
    again = chat(client, data, "Which colour?")
    assert again.choices[0].message.content == first.choices[0].message.content
    other = anthropic.Anthropic(base_url=server.url, api_key="unused", timeout=WAIT_S, max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": in_base64(data)}
    content: Any = [{"type": "text", "text": BEFORE}, {"type": "image", "source": source}]
    content.append({"type": "text", "text": "Which shape?"})
    third = other.messages.create(model="seer", max_tokens=6, messages=[{"role": "user", "content": content}])
    whole = third.usage.input_tokens + (third.usage.cache_read_input_tokens or 0)
    shared = len("<user>") + len(BEFORE) + tokens + 2 + len("Which ")
    for cached in (again.usage.prompt_tokens_details.cached_tokens, third.usage.cache_read_input_tokens):
        assert cached >= shared // PAGE * PAGE
    assert whole == again.usage.prompt_tokens - 1 and computed(http) == before + 1


def test_another_pixel_shares_the_text_before_it_only(http: httpx.Client, client: openai.OpenAI) -> None:
    shown = picture(160, 120, 2)
    chat(client, encoded(shown), "Which colour?")
    before, pixels = computed(http), np.array(shown)
    pixels[-1, -1, 0] ^= 1
    usage = chat(client, encoded(Image.fromarray(pixels)), "Which colour?").usage
    start = len("<user>") + len(BEFORE) + 1
    assert start // PAGE * PAGE <= usage.prompt_tokens_details.cached_tokens <= start
    assert computed(http) == before + 1


def test_choices_streams_and_later_turns_see_it(client: openai.OpenAI, http: httpx.Client) -> None:
    data, before = fresh(3), computed(http)
    both = chat(client, data, "Say it.", n=3)
    assert len(both.choices) == 3 and both.usage.prompt_tokens_details.image_tokens == 300
    chunks = [*chat(client, data, "Say it.", stream=True, stream_options={"include_usage": True})]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == both.choices[0].message.content and chunks[-1].usage.prompt_tokens_details.image_tokens == 300
    begun = client.responses.create(
        model="seer",
        max_output_tokens=6,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": BEFORE},
                    {"type": "input_image", "image_url": data_url(data), "detail": "auto"},
                ],
            }
        ],
    )
    then = client.responses.create(model="seer", max_output_tokens=6, input="And then?", previous_response_id=begun.id)
    assert then.usage is not None and then.usage.input_tokens_details.cached_tokens >= 300
    assert computed(http) == before + 1


def test_a_batch_sees(client: openai.OpenAI, http: httpx.Client) -> None:
    data = fresh(4)
    alone = chat(client, data, "Name it.").choices[0].message.content
    content = [
        {"type": "text", "text": BEFORE},
        {"type": "image_url", "image_url": {"url": data_url(data)}},
        {"type": "text", "text": "Name it."},
    ]
    body = {"model": "seer", "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    lines = [{"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}]
    file = "\n".join(map(json.dumps, lines)).encode()
    upload = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", file)}).json()
    asked = {"input_file_id": upload["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=asked).json()
    while batch["status"] not in ("completed", "failed"):
        batch = http.get(f"/v1/batches/{batch['id']}").json()
    [result] = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert json.loads(result)["response"]["body"]["choices"][0]["message"]["content"] == alone


def test_other_requests_are_not_changed_by_images_beside_them(client: openai.OpenAI, http: httpx.Client) -> None:
    """Texts and images of several sizes at once: each answer is the one that it has alone."""
    import concurrent.futures

    asked = [(fresh(20 + i, 40 + 24 * i, 200 - 24 * i), f"Number {i}") for i in range(6)]

    def ask(one: tuple[bytes, str]) -> Any:
        return chat(client, *one).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = [*pool.map(ask, asked)]
    http.delete("/v1/cache")
    assert [ask(one) for one in asked] == together


@pytest.mark.wide
def test_the_torch_engine_answers_as_the_cpu_engine_does(folder: Path, client: openai.OpenAI) -> None:
    def likeliest(one: openai.OpenAI) -> dict[str, float]:
        found = chat(one, fresh(9), "Which colour?", logprobs=True, top_logprobs=5).choices[0].logprobs
        return {top.token: top.logprob for top in found.content[0].top_logprobs}

    flags = ("--served-model-name", "seer", "--engine", "torch", "--device", "cpu", "--dtype", "float32")
    with serving("--model", str(folder), *flags) as running:
        other = openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", timeout=WAIT_S, max_retries=0)
        assert other.models.list().data[0].model_extra["vision"] is True  # type: ignore[index]
        ours, theirs = likeliest(other), likeliest(client)
    assert ours == pytest.approx(theirs, abs=0.01)  # their KV is float16
