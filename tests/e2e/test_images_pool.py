"""Requests with images in a pool whose engines are killed: each answer is the one of an undisturbed server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest

from tests.helpers.data_parallel import engine_processes, until_all_ready
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.image_files import encoded, picture
from tests.helpers.seconds import WAIT_S
from tests.helpers.sight import data_url
from tests.helpers.vision_chat import talking

NUM_KILLS, NUM_REQUESTS = 2, 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = str(talking(tmp_path_factory.mktemp("seer")))
    with serving("--model", folder, "--dp", "2", "--num-threads", "1", "--num-pages", "400") as running:
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


def test_requests_with_images_survive_kills(server: ServerProcess) -> None:
    alone = [ask(server, at) for at in range(NUM_REQUESTS)]
    moved = 0
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        for kill in range(NUM_KILLS):
            httpx.delete(f"{server.url}/v1/cache", timeout=WAIT_S).raise_for_status()
            running = [pool.submit(ask, server, at) for at in range(NUM_REQUESTS)]
            wait(running, return_when=FIRST_COMPLETED)
            engine_processes(server)[kill % 2].kill()
            assert [one.result() for one in running] == alone
            until_all_ready(server, 2)
            moved = sum("moved to other" in line for line in server.lines)
    assert moved, "no request was in a killed engine"
