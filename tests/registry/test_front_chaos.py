"""Two models with two engines each behind one port: engines of both are killed at once, again and again, and no stream
loses, repeats or changes a token."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.data_parallel import Ask, Chaos, random_ask, until_all_ready
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import echo, write_models

NAMES = "ab"
NUM_ENGINES = 2
NUM_KILLS = 4  # of each model's engines
NUM_STREAMS = 24  # to each model


@dataclass(frozen=True)
class Behind:
    """One model's server."""

    url: str
    process: psutil.Process
    lines: list[str]


def behind(server: ServerProcess, name: str) -> Behind:
    found = [match[1] for line in server.lines if (match := re.search(rf"\b{name}: ready: (\S+)", line))]
    url = httpx.URL(found[-1])
    for child in psutil.Process(server.process.pid).children():
        if any(one.laddr.port == url.port and one.status == "LISTEN" for one in child.net_connections()):
            return Behind(str(url), child, server.lines)
    raise AssertionError(f"no process listens for {name}")


@pytest.fixture
def server(tmp_path: Path, front_end: str) -> Iterator[ServerProcess]:
    flags = f"--engine echo --page-size 16 --num-pages 1024 --no-access-log --dp {NUM_ENGINES} --frontend {front_end}"
    models = [echo(name, flags=flags, memory="400MB", preload=True) for name in NAMES]
    with serving("--models", write_models(tmp_path / "models.yaml", models), "--memory", "1GB") as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_of_two_models_are_killed(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=2 * WAIT_S) as http:
        for name in NAMES:
            assert http.post(f"/v1/models/{name}/load", json={}).status_code == 200
    storms = list[Chaos]()
    for seed, name in enumerate(NAMES):

        def make(rng: random.Random, max_tokens: int, name: str = name) -> Ask:
            return dataclasses.replace(random_ask(rng, max_tokens), model=name)

        storms.append(Chaos(behind(server, name), NUM_ENGINES, seed, make, NUM_STREAMS, server.url))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.run(NUM_KILLS), storms))
    for name, storm in zip(NAMES, storms, strict=True):
        until_all_ready(behind(server, name), NUM_ENGINES)
        assert storm.num_kills >= NUM_KILLS and storm.num_answers >= NUM_STREAMS
        print(f"{name}: {storm.num_kills} kills, {storm.num_answers} answers")
    lines = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text.splitlines()
    assert [line for line in lines if line.startswith("minisgl:model_unloads_total")] == [
        f'minisgl:model_unloads_total{{model_name="{name}"}} 0.0' for name in NAMES
    ]
