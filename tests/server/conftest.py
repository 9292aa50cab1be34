"""A server and a client of it for each file of tests; files that want another one have a fixture of the same name."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.server import Frontend, frontend


@pytest.fixture(scope="module")
def server() -> Iterator[Frontend]:
    with frontend() as running:
        yield running
        running.wait_until(lambda: running.client.num_live == 0)  # whatever the tests sent, nothing was left behind


@pytest.fixture(scope="module")
def http(server: Frontend) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client
