"""Random requests for six models of which two fit, by eight clients: each answer is exact, no model is unloaded while
it answers, and the servers never take more than the budget. With SIGKILL of random servers between, whoever is not cut
gets what he asked for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import echo, expected, write_models

NAMES = "abcdef"
BUDGET = 320_000_000  # of models that are given 150,000,000 each
NUM_CLIENTS = 8
UNLOADING = re.compile(r"(\w+): unloading: .* \((\d+) requests\)")
UNLOADED = re.compile(r"(\w+): unloaded after")


@contextlib.contextmanager
def watching(server: ServerProcess) -> Iterator[list[int]]:
    """How much memory all servers take, several times a second."""
    found: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.1):
            total = 0
            for child in server.children():
                with contextlib.suppress(psutil.Error):
                    total += child.memory_full_info().pss
            found.append(total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def lives(server: ServerProcess) -> list[tuple[int, list[str]]]:
    """Of each server that was unloaded: the requests that it had when it was told to end, and how each that it had ever
    had did end, as it said itself."""
    ends, found = dict[str, list[str]](), []
    waiting: dict[str, int] = {}
    for line in server.lines:
        name, _, said = line.partition(": ")
        if line.startswith("{"):
            event = json.loads(line)["event"]
            if match := UNLOADING.match(event):
                waiting[match[1]] = int(match[2])
            elif match := UNLOADED.match(event):
                found.append((waiting.pop(match[1]), ends.pop(match[1], [])))
        elif name in NAMES and '"event": "request"' in said:
            fields = json.loads(said)
            ends.setdefault(name, []).append(f"{fields['status']} {fields.get('error', 'ok')}")
    return found


def stream(http: httpx.Client, model: str, prompt: str, length: int, seed: int) -> tuple[str, str | None]:
    """The text and an error's code."""
    body = {"model": model, "prompt": prompt, "max_tokens": length, "seed": seed, "ignore_eos": True, "stream": True}
    text, code = "", None
    with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return "", json.loads(answer.read())["error"]["code"]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                code = event.get("error", {}).get("code", code)
                text += "".join(choice["text"] for choice in event.get("choices", ()))
    return text, code


def run(server: ServerProcess, number: int, seed: int, kill_every: int | None = None) -> int:
    """As many requests; returns how many were answered. With every n-th a process of a server is killed before it."""
    rng = random.Random(seed)
    asked = [(rng.choice(NAMES), f"request {i}", rng.randint(1, 200), i) for i in range(number)]
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    with httpx.Client(base_url=server.url, timeout=4 * WAIT_S, limits=limits) as http:

        def one(request: tuple[str, str, int, int]) -> bool:
            model, prompt, length, i = request
            if kill_every is not None and i % kill_every == 0:
                with contextlib.suppress(psutil.Error, IndexError):
                    random.Random(i).choice(server.children()).kill()
            text, code = stream(http, model, prompt, length, i)
            want = expected(prompt, length, i, to_the_end=True)
            if kill_every is not None and code is not None:
                assert code in ("engine_unavailable", "model_not_loaded", "loading"), code
                assert want.startswith(text), (request, text)
                return False
            assert (text, code) == (want, None), request
            return True

        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
            return sum(pool.map(one, asked))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    (tmp_path / "delay").write_text("2")
    file = write_models(tmp_path / "models.yaml", [echo(name) for name in NAMES])
    settings = ["--models", file, "--memory", str(BUDGET), "--log-format", "json"]
    with serving(*settings, env={"MINISGL_STEP_DELAY_FILE": str(tmp_path / "delay")}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_random_requests(server: ServerProcess) -> None:
    with watching(server) as taken:
        assert run(server, 200, seed=1) == 200
    gone = lives(server)
    assert len(gone) > 20, "nothing had to go: the test tests nothing"
    assert {num_requests for num_requests, _ in gone} == {0}
    assert {end for _, ends in gone for end in ends} == {"200 ok"}
    print(f"{len(gone)} unloadings, {max(taken) / 1e6:.0f} MB of {BUDGET / 1e6:.0f} MB at most")
    assert max(taken) <= 1.05 * BUDGET


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_servers_that_are_killed_at_random(server: ServerProcess) -> None:
    whole = run(server, 100, seed=2, kill_every=8)
    print(f"{whole} of 100 answered")
    assert whole >= 40
    with httpx.Client(base_url=server.url, timeout=4 * WAIT_S) as http:
        for name in NAMES:
            deadline = time.monotonic() + 4 * WAIT_S
            while (found := stream(http, name, "after it", 20, 0))[1] is not None:
                assert found[1] == "model_not_loaded" and time.monotonic() < deadline, found
                time.sleep(0.2)
            assert found[0] == expected("after it", 20, to_the_end=True)
