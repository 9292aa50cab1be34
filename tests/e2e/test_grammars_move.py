"""An object whose engine dies in its middle is what it would have been, from whichever engine its end comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.helpers.data_parallel import WAIT_S, engine_processes, pool, until_all_ready
from tests.helpers.e2e import Brake, ServerProcess, until

ECHO = ("--engine", "echo", "--page-size", "16", "--num-pages", "2048", "--no-access-log")
NOTE = {"type": "string", "minLength": 400, "maxLength": 500}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "notes": {"type": "array", "items": NOTE, "minItems": 3, "maxItems": 3},
        "count": {"type": "integer"},
    },
    "required": ["notes", "count"],
    "additionalProperties": False,
}


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path, 0)


@pytest.fixture
def server(brake: Brake) -> Iterator[ServerProcess]:
    with ServerProcess((*ECHO, "--dp", "2"), brake.env) as running:
        yield running
        assert running.stop() == 0, "\n".join(running.lines)


async def ask(http: httpx.AsyncClient, seed: int) -> tuple[str, str]:
    body = {
        "messages": [{"role": "user", "content": f"{seed} is the number"}],
        "seed": seed,
        "max_tokens": 6000,
        "response_format": {"type": "json_schema", "json_schema": {"name": "notes", "schema": SCHEMA, "strict": True}},
    }
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def test_structured_output_survives_a_killed_engine(server: ServerProcess, brake: Brake) -> None:
    until_all_ready(server, 2)
    seeds = range(6)

    def lose_one() -> None:
        until(lambda: min(pool(server)["loads"]) > 0, "an engine has nothing to do")
        engine_processes(server)[0].kill()
        brake.release()

    async def run() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
            alone = [await ask(http, seed) for seed in seeds]
            brake.hold(20)
            tasks = [asyncio.create_task(ask(http, seed)) for seed in seeds]
            await asyncio.to_thread(lose_one)
            return alone, await asyncio.gather(*tasks)

    moved = pool(server)["num_moved_total"]
    alone, disturbed = asyncio.run(run())
    assert disturbed == alone
    assert pool(server)["num_moved_total"] > moved
    assert len({text for text, _ in alone}) == len(seeds)
    for text, reason in alone:
        assert reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    until_all_ready(server, 2)
