"""A client of the server that a file of tests has as its `server`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.e2e import ServerProcess
from tests.helpers.seconds import WAIT_S


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client
