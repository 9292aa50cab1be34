"""The official client, beside the fixtures of the server's tests."""

from __future__ import annotations

import anthropic
import pytest

from tests.helpers.server import Frontend


@pytest.fixture(scope="module")
def client(server: Frontend) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
