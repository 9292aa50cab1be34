"""Meaning with several engines: the embedded model, and answers that outlive their engine.

A moved request's tokens are computed again as a prompt, and the CPU engine may round that otherwise than a decode
step: only answers of which each token is sure (`tests/helpers/meaning.py`) are the same for certain.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minisgl.config import ConfigError
from minisgl.weights.sources import find_smollm2
from tests.helpers.data_parallel import engine_processes, pool
from tests.helpers.e2e import serving, until
from tests.helpers.meaning import CAPITALS, MAX_TOKENS, capital
from tests.helpers.seconds import WAIT_S

try:
    find_smollm2()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.any_cpu
def test_answers_outlive_their_engine() -> None:
    with serving("--model", "smollm2", "--dp", "2", "--routing", "rr", "--num-pages", "512") as server:

        def ask(country: str) -> str:
            body = {
                "messages": [{"role": "user", "content": capital(country)}],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
            text: str = answer["choices"][0]["message"]["content"]
            return text

        alone = {country: ask(country) for country in CAPITALS}
        assert all(city in alone[country] for country, city in CAPITALS.items())
        with ThreadPoolExecutor(12) as threads:
            together = threads.map(ask, list(CAPITALS) * 3)
            until(lambda: min(pool(server)["loads"]) > 0, "an engine has nothing to do")
            engine_processes(server)[0].kill()
            assert list(together) == [alone[country] for country in CAPITALS] * 3
        assert pool(server)["num_moved_total"] > 0
