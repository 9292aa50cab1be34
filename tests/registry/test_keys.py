"""What a key may do holds for all models of a port together: what waits, what was used, what is in the engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.config import ApiKey
from minisgl.registry.keys import ANSWERED, FRESH_S, KeyLimits
from minisgl.registry.server import Child, ChildServer
from minisgl.server import routes
from minisgl.server.core.errors import ApiError
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import echo, entry, model, several, write_models

PER_MINUTE = 3000
KEYS = [
    {"name": "admin", "key": "admin", "models": True},
    {"name": "queues", "key": "queues", "max_queued_requests": 2},
    {"name": "rated", "key": "rated", "tokens_per_minute": PER_MINUTE},
    {"name": "narrow", "key": "narrow", "max_inflight": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def server(folder: Path, front_end: str) -> Iterator[ServerProcess]:
    """Three models, all loaded, each of which answers one request at a time."""
    (folder / "keys.yaml").write_text(json.dumps({"keys": KEYS}))
    (folder / "delay").write_text("0")
    flags = f"--engine echo --num-pages 500 --max-running-requests 1 --frontend {front_end}"
    file = write_models(folder / "models.yaml", [echo(name, flags=flags) for name in "abc"])
    settings = ["--models", file, "--memory", "500MB", "--api-key-file", str(folder / "keys.yaml")]
    with serving(*settings, env={"MINISGL_STEP_DELAY_FILE": str(folder / "delay")}) as running:
        with client(running, "admin") as http:
            for name in "abc":
                assert http.post(f"/v1/models/{name}/load", json={}).status_code == 200
        yield running


@pytest.fixture
def slow(folder: Path) -> Iterator[None]:
    (folder / "delay").write_text("20")
    yield
    (folder / "delay").write_text("0")


def client(server: ServerProcess, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=2 * WAIT_S, headers={"authorization": f"Bearer {key}"})


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "prompt": "hello", "max_tokens": 4, "ignore_eos": True, **more}


@contextlib.contextmanager
def streaming(http: httpx.Client, name: str) -> Iterator[Iterator[str]]:
    """It has begun, and lasts."""
    with http.stream("POST", "/v1/completions", json=body(name, max_tokens=4000, stream=True)) as stream:
        lines = stream.iter_lines()
        assert stream.status_code == 200 and next(lines)
        yield lines


def waiting(server: ServerProcess, key: str) -> int:
    with client(server, "admin") as http:
        lines = http.get("/metrics").text.splitlines()
    start = f'minisgl:key_requests_waiting{{key="{key}"}} '
    return next(int(float(line.removeprefix(start))) for line in lines if line.startswith(start))


@pytest.mark.usefixtures("slow")
def test_as_many_requests_of_a_key_wait_for_all_models(server: ServerProcess) -> None:
    """One for each of two models: a third is refused, though no server has two."""
    with client(server, "queues") as http, client(server, "admin") as admin, ThreadPoolExecutor() as pool:
        with streaming(admin, "a"), streaming(admin, "b"):
            answers = [pool.submit(http.post, "/v1/completions", json=body(name)) for name in "ab"]
            until(lambda: waiting(server, "queues") == 2, "they do not wait")
            refused = http.post("/v1/completions", json=body("c"))
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "key_limit", refused.text
            assert "2 of its requests are queued, its limit is 2 (max_queued_requests)" in refused.text
            assert refused.headers["retry-after"] == "1"
            assert admin.post("/v1/completions", json=body("c")).status_code == 200
            lines = admin.get("/metrics").text
            assert 'minisgl:key_refused_total{key="queues",limit="max_queued_requests"} 1.0' in lines
            assert lines.count("# TYPE minisgl:key_refused_total ") == 1
        assert [one.result().status_code for one in answers] == [200, 200]
    until(lambda: waiting(server, "queues") == 0, "they wait for ever")


def test_tokens_per_minute_are_of_all_models(server: ServerProcess) -> None:
    """Each server alone would let its key go on."""
    with client(server, "rated") as http:
        for name in "ab":
            prompt = "x" * (PER_MINUTE * 95 // 100)
            assert http.post("/v1/completions", json=body(name, prompt=prompt)).status_code == 200
        until(lambda: http.post("/v1/completions", json=body("c")).status_code == 429, "its tokens are not counted")
        refused = http.post("/v1/completions", json=body("a"))
        assert f"its {PER_MINUTE} tokens per minute are used up (tokens_per_minute)" in refused.text
        assert int(refused.headers["retry-after"]) > 1
        with client(server, "admin") as admin:  # nor does a server take with it what it has counted
            for name in "ab":
                assert admin.post(f"/v1/models/{name}/unload", json={}).status_code == 200
            assert http.post("/v1/completions", json=body("a")).status_code == 429
            for name in "ab":
                assert admin.post(f"/v1/models/{name}/load", json={}).status_code == 200


@pytest.mark.usefixtures("slow")
def test_as_many_requests_of_a_key_are_in_all_engines(server: ServerProcess) -> None:
    with client(server, "narrow") as http, client(server, "admin") as admin, ThreadPoolExecutor() as pool:
        with streaming(http, "a"), streaming(http, "b"):
            third = pool.submit(http.post, "/v1/completions", json=body("c"))
            until(lambda: waiting(server, "narrow") == 1, "it does not wait")
            assert http.post("/tokenize", json=body("c")).status_code == 200  # takes no place
            of_c = lambda: admin.get("/stats").json()["models"].get("c", {}).get("load", {})  # noqa: E731
            until(lambda: of_c().get("num_running") == 0, "it runs")
            assert admin.post("/v1/completions", json=body("c")).status_code == 200
            assert not third.done()
        assert third.result().status_code == 200


def test_where_a_request_takes_a_place() -> None:
    """In whatever computes an answer."""
    light = {"/tokenize", "/detokenize", "/apply-template", "/abort_request", "/api/show"}
    light |= {path for path in routes.POSTS if path.endswith(("_tokens", "_adapter", "/prefixes"))}
    assert set(routes.POSTS) - light == ANSWERED


async def test_other_output_of_a_server_is_ignored() -> None:
    reader = asyncio.StreamReader(limit=100)
    child = ChildServer(Child(os.posix_spawn("/bin/true", ["true"], {}), ""), asyncio.create_task(asyncio.sleep(0)))
    for line in (b"[[0,0],[2,30]]\n", b"a library's news\n", b"{}\n", b"x" * 300 + b"\n"):
        reader.feed_data(line)
    reader.feed_eof()
    await child._hear_uses(reader)
    assert child.use == [(0, 0), (2, 30)]
    await child.ended


async def test_sent_request_counts_as_waiting_until_reported() -> None:
    now = 100.0
    async with several(entry("a"), entry("b"), room_for=2) as (_, found):
        limits = KeyLimits([ApiKey(name="k", key="k", max_queued_requests=3)], found, lambda: now)
        a, b = model(found, "a"), model(found, "b")
        with found.lease(a) as lease:
            server = await lease.ready
            with limits.ask(1, "/generate", a) as first, limits.ask(1, "/generate", b) as second:
                assert limits.num_waiting(1) == 2 and limits.num_waiting(0) == 0
                await first.turn()
                server.use = [(0, 0), (1, 10)]  # the same one
                assert limits.num_waiting(1) == 2
                server.use = [(0, 0), (2, 10)]
                assert limits.num_waiting(1) == 3
                with pytest.raises(ApiError) as refusal:
                    limits.ask(1, "/generate", a)
                assert refusal.value.status == 429
                limits.ask(0, "/generate", a)
                server.use = [(0, 0), (0, 10)]
                now += 2 * FRESH_S  # then its server knows best
                assert limits.num_waiting(1) == 1
                await second.turn()
                second.begins()
                assert limits.num_waiting(1) == 0
        await found.unload(a)
        assert found.used_by_gone[1] == 10
