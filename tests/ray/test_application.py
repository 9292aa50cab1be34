"""The application on a real cluster: what clients get through Serve is what the bare server says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
import pytest

from tests.helpers.data_parallel import Ask
from tests.helpers.e2e import until
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import data_of

if TYPE_CHECKING:
    from tests.helpers.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
ECHO = "--engine echo --page-size 16 --num-pages 1024 --no-access-log"
LONG = {"prompt": "on and on", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def two(cluster: RayCluster) -> RayCluster:
    cluster.deploy(name="echo", flags=ECHO, replicas=2)
    return cluster


@pytest.fixture
def http(cluster: RayCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S) as client:
        yield client


def test_texts_are_exact_under_load(two: RayCluster) -> None:
    assert two.under_load(lambda: None) >= 64


def test_an_official_client(two: RayCluster) -> None:
    asks = [Ask(f"question {i}", 2 * i, 40) for i in range(16)]

    async def ask(client: openai.AsyncOpenAI, ask: Ask) -> str:
        more: dict[str, Any] = {"ignore_eos": True}
        fixed: dict[str, Any] = {"model": "echo", "prompt": ask.prompt, "seed": ask.seed, "max_tokens": ask.max_tokens}
        stream = await client.completions.create(**fixed, temperature=0, stream=True, extra_body=more)
        streamed = "".join([event.choices[0].text async for event in stream])
        whole = await client.completions.create(**fixed, temperature=0, extra_body=more)
        assert whole.choices[0].text == streamed
        return streamed

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, one) for one in asks))

    assert asyncio.run(run()) == [one.text() for one in asks]


def test_both_replicas_answer(two: RayCluster) -> None:
    before = [sum(one.cpu_times()[:2]) for one in two.engines()]
    two.under_load(lambda: None, num_streams=32)
    after = [sum(one.cpu_times()[:2]) for one in two.engines()]
    assert len(before) == 2
    assert all(x < y for x, y in zip(before, after, strict=True))


def test_request_ids_and_errors_are_the_servers(two: RayCluster, http: httpx.Client) -> None:
    fine = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "mine-7"})
    assert fine.status_code == 200
    assert fine.headers.get_list("x-request-id") == ["mine-7"]
    assert fine.headers["x-minisgl-max-tokens"] == "2"
    assert len({name.lower() for name, _ in fine.headers.raw}) == len(fine.headers.raw), fine.headers
    bad = http.post("/v1/completions", json={"prompt": "a", "temperature": 9})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "temperature"
    assert http.get("/nowhere").json()["error"]["code"] == "not_found"
    assert http.post("/v1/completions", json={"model": "other", "prompt": "a"}).json()["error"]["param"] == "model"
    assert http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert http.get("/livez").json() == {"status": "ok"}
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"Origin": two.url}).status_code == 200
    assert http.post("/v1/completions", json=body, headers={"Origin": "http://other.example"}).status_code == 403
    assert http.post("/v1/completions", json=body, headers={"Host": "other.example"}).status_code == 403
    assert http.post("/v1/completions", json=body, headers={"X-Minisgl-Marks": "9"}).status_code == 200
    assert http.get("/v1/models").json()["data"][0]["id"] == "echo"
    assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3


def test_a_client_that_leaves_ends_its_request(cluster: RayCluster, http: httpx.Client) -> None:
    cluster.deploy(name="echo", flags=f"{ECHO} --max-seq-len 9000", replicas=1)

    def num_running() -> int:
        return int(http.get("/stats").json()["load"]["num_running"])

    with http.stream("POST", "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        assert next(data for line in lines if (data := data_of(line)))
    until(lambda: num_running() == 0, "the request of a client that left goes on")


def test_full_queue_gets_429(cluster: RayCluster, http: httpx.Client) -> None:
    cluster.deploy(name="echo", flags=f"{ECHO} --max-running-requests 2 --max-queued-requests 2", replicas=1)

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=WAIT_S) as client:
            body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(60)))

    cluster.slow_motion(10)  # else a slow client's are answered one after the other
    try:
        answers = asyncio.run(run())
    finally:
        cluster.slow_motion(0)
    assert {one.status_code for one in answers} == {200, 429}
    full = next(one for one in answers if one.status_code == 429)
    assert full.headers["retry-after"] == "1"
    assert full.json()["error"]["code"] == "queue_full"


def test_several_models_and_a_key(cluster: RayCluster, http: httpx.Client) -> None:
    models = {"small": {"flags": f"{ECHO} --api-key k --max-seq-len 64"}, "large": {"flags": f"{ECHO} --api-key k"}}
    cluster.deploy(models=models)
    assert http.post("/v1/completions", json={"model": "large", "prompt": "a"}).status_code == 401
    assert http.get("/v1/models").status_code == 401
    key = {"Authorization": "Bearer k"}
    listed = http.get("/v1/models", headers=key).json()["data"]
    assert [one["id"] for one in listed] == ["small", "large"]
    assert listed[0]["max_model_len"] == 64 < listed[1]["max_model_len"]
    for name in models:
        answer = http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 3}, headers=key)
        assert answer.json()["model"] == name
    other = http.post("/v1/completions", json={"model": "none", "prompt": "a"}, headers=key)
    assert other.json()["error"]["code"] == "model_not_found"


def test_a_deployment_that_goes_leaves_no_server(cluster: RayCluster) -> None:
    cluster.deploy(name="echo", flags=ECHO)
    servers = cluster.servers()
    assert servers
    cluster.delete()
    _, alive = psutil.wait_procs(servers, timeout=WAIT_S)
    assert not alive


def test_streams_of_every_api(cluster: RayCluster, http: httpx.Client) -> None:
    cluster.deploy(name="echo", flags=ECHO)
    messages = [{"role": "user", "content": "abc"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 5},
        "/v1/responses": {"input": "abc", "max_output_tokens": 5},
        "/v1/messages": {"model": "echo", "messages": messages, "max_tokens": 5},
        "/generate": {"prompt": "abc", "max_tokens": 5},
    }
    for path, body in bodies.items():
        text = http.post(path, json={**body, "stream": True}).text
        assert ": minisgl" not in text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
        assert len([json.loads(line) for line in lines]) >= 2, path


def test_a_flood_of_one_key_leaves_rows_for_another(cluster: RayCluster, tmp_path: Path) -> None:
    """The same attack as on one server, tests/e2e/test_attacks.py."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: alice, key: alice}, {name: bob, key: bob}]")
    flags = f"--engine echo --num-pages 40000 --max-running-requests 32 --max-queued-requests 48 --api-key-file {keys}"
    cluster.deploy(name="echo", flags=flags, replicas=1)

    def client(key: str) -> httpx.Client:
        return httpx.Client(base_url=cluster.url, timeout=2 * WAIT_S, headers={"authorization": f"Bearer {key}"})

    flood = {"prompt": "on and on", "n": 128, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    cluster.slow_motion(20)
    try:
        with (
            client("alice") as alice,
            client("bob") as bob,
            alice.stream("POST", "/v1/completions", json=flood) as told,
        ):
            lines = told.iter_lines()  # held: its end closes the connection
            assert next(data for line in lines if (data := data_of(line)))
            until(lambda: bob.get("/stats").json()["load"]["num_running"] >= 16, "her rows are not taken")
            error = alice.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert error.status_code == 429 and "of them of this API key" in error.text, error.text
            assert bob.post("/v1/completions", json={"prompt": "b", "max_tokens": 1}).status_code == 200
            assert bob.get("/stats").json()["load"]["num_running"] >= 16, "she has not ended before"
    finally:
        cluster.slow_motion(0)
