"""Servers as they may be deployed, each with a little behind it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.gateway import has_gateway
from tests.helpers.seconds import WAIT_S

ECHO = ("--engine", "echo", "--num-pages", "512", "--no-access-log")
KINDS = {
    "python": ("--frontend", "python"),
    "rust": ("--frontend", "rust"),
    "pool": ("--frontend", "rust", "--dp", "2"),
}
NUM_REQUESTS = 12


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "python" and not has_gateway():
        pytest.skip("the extension has no gateway")
    return name


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[ServerProcess]:
    """One that has answered requests, equal ones and different ones, and says so in its metrics."""
    with serving(*ECHO, *KINDS[kind]) as running:
        with httpx.Client(base_url=running.url, timeout=WAIT_S) as client:

            def ask(number: int) -> None:
                messages = [{"role": "user", "content": f"{'a line of many ' * 20}{number % 3}"}]
                body = {"model": "smollm2", "messages": messages, "max_tokens": 8}
                client.post("/v1/chat/completions", json=body).raise_for_status()

            with ThreadPoolExecutor(4) as threads:
                list(threads.map(ask, range(NUM_REQUESTS)))
            until(lambda: counted(client), "the engine's numbers do not come")
        yield running


def counted(client: httpx.Client) -> bool:
    """Whether the engine's snapshot, which comes later than answers, has all of it."""
    found = client.get("/metrics").text
    return (
        sum(
            float(line.split()[-1])
            for line in found.splitlines()
            if line.startswith(("minisgl:cache_hits_total", "minisgl:cache_misses_total"))
        )
        == NUM_REQUESTS
    )
