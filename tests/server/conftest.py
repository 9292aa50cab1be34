"""A server and a client of it for each file of tests; files that want another one have a fixture of the same name."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest

from tests.helpers.server import CONFIG, Frontend, frontend


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)  # whatever the tests sent, nothing was left behind


@pytest.fixture(scope="module")
def parsing_server(front_end: str) -> Iterator[Frontend]:
    """It tells calls and thoughts from text; a file of tests of these has it as its `server`."""
    config = msgspec.structs.replace(CONFIG, tool_call_parser="hermes", reasoning_parser="qwen3")
    with frontend(front_end=front_end, config=config, max_seq_len=2048) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


@pytest.fixture(scope="module")
def http(server: Frontend) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client
