"""The official client, beside the fixtures of the server's tests."""

from __future__ import annotations

import openai
import pytest

from tests.helpers.server import Frontend


@pytest.fixture(scope="module")
def client(server: Frontend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
