"""What one API key does to others: everything that is counted once for all callers has a share for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.e2e import Brake, ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S

ROWS, QUEUED = 32, 48
FLAGS = f"--engine echo --num-pages 40000 --max-running-requests {ROWS} --max-queued-requests {QUEUED}"


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path, 0)


@pytest.fixture(params=["1", pytest.param("2", marks=pytest.mark.wide)])
def server(tmp_path: Path, brake: Brake, front_end: str, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: alice, key: alice}, {name: bob, key: bob}]")
    more = ("--frontend", front_end, "--dp", request.param, "--api-key-file", str(keys))
    with serving(*FLAGS.split(), *more, env=brake.env) as running:
        yield running


def client(server: ServerProcess, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=2 * WAIT_S, headers={"authorization": f"Bearer {key}"})


def load(http: httpx.Client) -> tuple[int, int]:
    found = http.get("/stats").json()["load"]
    return found["num_running"], found["num_waiting"]


@contextlib.contextmanager
def flooded(server: ServerProcess, count: int) -> Iterator[None]:
    """Alice's request for `count` long answers is being computed, as far as there are rows for her."""
    body = {"prompt": [5, 6, 7], "n": count, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with client(server, "alice") as http, http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert stream.status_code == 200 and next(lines)
        yield


def test_a_flood_of_one_key_leaves_rows_for_another(server: ServerProcess, brake: Brake) -> None:
    """It was 37 s until the other's first token: an engine takes no row back."""
    brake.hold(20)
    with flooded(server, 128), client(server, "bob") as bob:
        until(lambda: load(bob)[0] >= ROWS // 2, "her rows are not taken")
        for _ in range(3):
            answer = bob.post("/v1/completions", json={"prompt": "b", "max_tokens": 1})
            assert answer.status_code == 200
            assert load(bob)[0] >= ROWS // 2, "she has not ended before"
    brake.release()


def test_a_key_fills_half_of_the_queue(server: ServerProcess, brake: Brake) -> None:
    brake.hold(20)
    one = {"prompt": "a", "max_tokens": 1}
    with flooded(server, 128), client(server, "alice") as alice, client(server, "bob") as bob:
        until(lambda: load(bob)[0] >= ROWS // 2, "her rows are not taken")
        for path in ("/v1/completions", "/generate"):
            error = alice.post(path, json={"text": "a"} if path == "/generate" else one)
            assert error.status_code == 429 and "of them of this API key" in error.text, error.text
        assert bob.post("/v1/completions", json=one).status_code == 200
    brake.release()
