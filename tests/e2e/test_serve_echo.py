"""A real server on the echo engine, talked to over sockets: exact texts, clean errors, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.engine.echo import EchoModel
from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import ServerProcess, serving, slow_device, until
from tests.helpers.seconds import WAIT_S

POOL = ("--engine", "echo", "--num-pages", "64", "--page-size", "4", "--max-running-requests", "12")
LIMIT = 64 * 4 + 1


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


def test_metrics_add_up(http: httpx.Client) -> None:
    until(lambda: all_pages_back(http), "not idle")
    text = http.get("/metrics").text
    value = {name: float(number) for name, number in re.findall(r"^(minisgl:[^\s]+) ([\d.e+-]+)$", text, re.M)}
    finished = sum(number for name, number in value.items() if name.startswith("minisgl:requests_finished_total"))
    assert finished == value["minisgl:requests_accepted_total"] > 0
    assert value["minisgl:requests_running"] == value["minisgl:requests_waiting"] == 0
    assert value["minisgl:cached_tokens_total"] > 0 and value['minisgl:ttft_seconds_bucket{le="0.001"}'] >= 0


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """A stream of eighty seconds, which SIGTERM would let end, is told so."""
    body = {"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with (
        ServerProcess(slow_device(tmp_path, 20)) as server,
        httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=WAIT_S) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert server.stop(signal.SIGINT) == 0
        assert "the server is shutting down" in [line for line in lines if line][-2]
