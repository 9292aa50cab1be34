"""Servers that guess tokens: the texts of many clients, their streams, stop strings, and what is counted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import expected

PROMPTS = [f"again and again and again {i}" for i in range(6)]
POOL = ("--engine", "echo", "--num-pages", "96", "--page-size", "4", "--max-running-requests", "12")


@pytest.fixture(scope="module", params=[("--frontend", "python"), ("--frontend", "rust"), ("--dp", "2"), ("--tp", "2")])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A pool so small that drafts find no pages now and then."""
    with serving(*POOL, "--speculative", "ngram:5", *request.param) as running:
        yield running


def alone(prompt: str, seed: int, stop: str | None) -> str:
    text = expected(prompt, 60, seed)
    return text[: text.index(stop)] if stop and stop in text else text


async def ask(client: httpx.AsyncClient, number: int) -> None:
    prompt, seed, stop = PROMPTS[number % len(PROMPTS)], number % 3, "tn" if number % 4 == 1 else None
    body = {"prompt": prompt, "seed": seed, "max_tokens": 60, "stop": stop, "stream": number % 2 == 0}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if body["stream"]:
        lines = re.findall(r"^data: (\{.*)$", answer.text, re.M)
        text = "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == alone(prompt, seed, stop)


async def ask_all(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        for _ in range(3):
            await asyncio.gather(*(ask(client, number) for number in range(24)))


def test_many_clients_get_what_each_would_get_alone(server: ServerProcess) -> None:
    asyncio.run(ask_all(server.url))

    def counted() -> tuple[float, float]:
        text = httpx.get(server.url + "/metrics").text
        names = ("minisgl:drafted_tokens_total", "minisgl:accepted_tokens_total")
        drafted, accepted = (float(re.findall(rf"^{name} ([\d.e+-]+)$", text, re.M)[0]) for name in names)
        return drafted, accepted

    until(lambda: counted()[1] > 20, "no token was accepted")
    assert counted()[0] >= counted()[1]
    until(lambda: idle(server.url), "pages or requests are left")
    engines = httpx.get(server.url + "/stats").json()["engines"]
    assert sum(one["stats"]["num_accepted_total"] for one in engines) == counted()[1]


def idle(url: str) -> bool:
    now = httpx.get(url + "/health").json()["stats"]
    free = now["num_free_pages"] + now["num_evictable_pages"]
    return bool(now["num_running"] + now["num_waiting"] == 0 and free == now["num_pages"])
