"""A real server on the echo engine, talked to over sockets: exact texts, clean errors, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
from collections.abc import Iterator

import httpx
import openai
import pytest

from minisgl.engine.echo import EchoModel
from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S

POOL = ("--engine", "echo", "--num-pages", "96", "--page-size", "4", "--max-running-requests", "12")
LIMIT = 96 * 4 + 1


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[ServerProcess]:
    """A pool so small that the requests of a test evict and retract each other."""
    with serving(*POOL, "--frontend", front_end) as running:
        yield running


def stats(http: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = http.get("/health").json()["stats"]
    return found


def all_pages_back(http: httpx.Client) -> bool:
    now = stats(http)
    return (
        now["num_running"] + now["num_waiting"] == 0
        and now["num_free_pages"] + now["num_evictable_pages"] == now["num_pages"]
    )


def expected(prompt: str, seed: int, max_tokens: int, stop: tuple[str, ...] = ()) -> tuple[str, str]:
    """Text and finish reason of the prompt alone."""
    ids = Tokenizer.echo().encode(prompt).tolist()
    max_tokens = min(max_tokens, LIMIT - len(ids))
    out = EchoModel(seed=seed).generate(ids, max_tokens)
    ended = out[-1] == 256
    text = bytes(out[:-1] if ended else out).decode()
    cuts = [text.index(one) for one in stop if one in text]
    if cuts:
        return text[: min(cuts)], "stop"
    return text, "stop" if ended else "length"


def test_openai_client_streams_and_does_not(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == ["smollm2"]
    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=30, seed=5)
    prompt = Tokenizer.echo().apply_chat_template(messages)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == expected(prompt, 5, 30)
    assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=30, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == (len(prompt) - 1) // 4 * 4  # all whole pages but the last


def test_stop_strings_cut_and_end(http: httpx.Client) -> None:
    stop = ("ta", "eo", "h ")
    found = set()
    for seed in range(12):
        body = {"prompt": "stop here", "max_tokens": 60, "seed": seed, "stop": list(stop)}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == expected("stop here", seed, 60, stop)
        found.add(choice["finish_reason"])
    assert "stop" in found
    until(lambda: all_pages_back(http), "a request ended by a stop string keeps pages")


def test_concurrent_clients_get_what_each_would_get_alone(server: ServerProcess, http: httpx.Client) -> None:
    """Shared prefixes, stop strings, disconnects, more work than the pool holds."""
    generator = random.Random(3)
    prefixes = ["", "You are a helpful assistant. ", "You are a helpful pirate. Speak like one. " * 2]

    async def one(client: httpx.AsyncClient, index: int) -> None:
        prompt = generator.choice(prefixes) + f"question {generator.randrange(20)}"
        seed, max_tokens = generator.randrange(5), generator.randrange(1, 120)
        stop = ("ta", "zz") if generator.random() < 0.3 else ()
        body = {"prompt": prompt, "seed": seed, "max_tokens": max_tokens, "stop": list(stop), "stream": True}
        leave_after = generator.randrange(20) if generator.random() < 0.25 else None
        text, reason, chunks = "", None, 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text, reason, chunks = text + choice["text"], choice["finish_reason"], chunks + 1
                if leave_after is not None and chunks > leave_after:
                    return
        assert (text, reason) == expected(prompt, seed, max_tokens, stop), f"client {index}"

    async def everyone() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as client:
            await asyncio.gather(*(one(client, index) for index in range(300)))

    before = stats(http)["num_retracted_total"]
    asyncio.run(everyone())
    until(lambda: all_pages_back(http), "pages leaked")
    assert stats(http)["num_retracted_total"] > before, "the pool is too large to test retraction"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(server: ServerProcess, http: httpx.Client, stream: bool) -> None:
    until(lambda: all_pages_back(http), "not idle at the start")
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "going away", "max_tokens": 300, "ignore_eos": True, "stream": stream}).encode()
    steps = stats(http)["num_steps_total"]
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        until(lambda: stats(http)["num_steps_total"] > steps + 5, "the request does not run")
    until(lambda: all_pages_back(http), "a client that went away keeps its pages")


def test_metrics_add_up(http: httpx.Client) -> None:
    until(lambda: all_pages_back(http), "not idle")
    text = http.get("/metrics").text
    value = {name: float(number) for name, number in re.findall(r"^(minisgl:[^\s]+) ([\d.e+-]+)$", text, re.M)}
    finished = sum(number for name, number in value.items() if name.startswith("minisgl:requests_finished_total"))
    assert finished == value["minisgl:requests_accepted_total"] > 0
    assert value["minisgl:requests_running"] == value["minisgl:requests_waiting"] == 0
    assert value["minisgl:cached_tokens_total"] > 0 and value['minisgl:ttft_seconds_bucket{le="0.001"}'] >= 0


def test_ctrl_c_ends_it_cleanly() -> None:
    server = ServerProcess(("--engine", "echo"))
    try:
        body = {"prompt": "x", "max_tokens": 8000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as answer:
            next(answer.iter_lines())
            assert server.stop(signal.SIGINT) == 0
    finally:
        server.kill()
