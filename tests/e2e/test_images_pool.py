"""Requests with images in a pool whose engines are killed: each answer is the one of an undisturbed server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.data_parallel import engine_processes, pool, until_all_ready
from tests.helpers.e2e import Brake, ServerProcess, serving, until
from tests.helpers.image_files import encoded, picture
from tests.helpers.seconds import WAIT_S
from tests.helpers.sight import data_url
from tests.helpers.vision_chat import talking

NUM_KILLS, NUM_REQUESTS = 2, 8


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path, 0)


@pytest.fixture
def server(brake: Brake, tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ("--dp", "2", "--num-threads", "1", "--num-pages", "400")
    with serving("--model", str(talking(tmp_path)), *settings, env=brake.env) as running:
        until_all_ready(running, 2)
        yield running


def ask(server: ServerProcess, at: int) -> str:
    sizes = [(64 + 32 * (at % 5), 96 + 32 * i) for i in range(1 + at % 3)]
    images = [encoded(picture(*size, seed=at // 2 + i)) for i, size in enumerate(sizes)]
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    content = [{"type": "text", "text": f"Number {at}"}, *parts, {"type": "text", "text": "and?"}]
    messages = [{"role": "user", "content": content}]
    sampling = {"max_tokens": 100, "ignore_eos": True, "seed": at, "temperature": float(at % 2), "n": 1 + at % 2}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, **sampling}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    choices: list[Any] = answer.json()["choices"]
    return str([(one["message"]["content"], one["finish_reason"]) for one in choices])


def generated(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.url}/stats", timeout=WAIT_S).json()["http"]["generated_tokens"])


def test_requests_with_images_survive_kills(server: ServerProcess, brake: Brake) -> None:
    alone = [ask(server, at) for at in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        for kill in range(NUM_KILLS):
            httpx.delete(f"{server.url}/v1/cache", timeout=WAIT_S).raise_for_status()
            moved, before = pool(server)["num_moved_total"], generated(server)
            brake.hold(500)  # so that no engine ends its requests before it is killed
            running = [clients.submit(ask, server, at) for at in range(NUM_REQUESTS)]
            until(lambda: min(pool(server)["loads"]) > 0, "an engine has nothing to do")
            until(lambda before=before: generated(server) >= before + NUM_REQUESTS, "no answer begins")  # type: ignore[misc]
            engine_processes(server)[kill % 2].kill()
            brake.release()
            assert [one.result() for one in running] == alone
            assert pool(server)["num_moved_total"] > moved
            until_all_ready(server, 2)
