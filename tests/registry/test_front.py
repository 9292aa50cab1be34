"""A real server of several models on echo engines: what clients see of it, and what it leaves behind."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import echo, expected, write_models

KEY = {"authorization": "Bearer admin"}
LONG = 900  # tokens: they take longer than anything else here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """Room for two of four; steps take as long as a file says."""
    (folder / "keys.yaml").write_text('keys: [{name: admin, key: admin, models: true}, {name: user, key: "user"}]')
    models = [
        echo("a", aliases=["also-a"]),
        echo("b"),
        echo("c"),
        echo("large", memory="400MB"),
        {"name": "gone", "model": str(folder / "gone.gguf"), "memory": "100MB"},
        {"name": "broken", "model": str(folder / "broken.gguf"), "memory": "100MB"},
    ]
    file = write_models(folder / "models.yaml", models)
    (folder / "delay").write_text("0")
    (folder / "broken.gguf").write_bytes(b"GGUF, and then nothing")
    settings = ["--models", file, "--memory", "330MB", "--api-key-file", str(folder / "keys.yaml")]
    with serving(*settings, env={"MINISGL_STEP_DELAY_FILE": str(folder / "delay")}) as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=2 * WAIT_S, headers=KEY) as client:
        yield client


def states(http: httpx.Client) -> dict[str, str]:
    return {one["id"]: one["state"] for one in http.get("/v1/models").json()["data"]}


def ask(http: httpx.Client, model: str, prompt: str = "hello", **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "seed": 0, **more}
    return http.post("/v1/completions", json=body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture
def slow(folder: Path) -> Iterator[Path]:
    """A step takes as many milliseconds as it says."""
    file = folder / "delay"
    file.write_text("200")  # another model is loaded meanwhile, which takes long on a slow machine
    yield file
    file.write_text("0")


def load(http: httpx.Client, *names: str) -> None:
    for name in names:
        answer = http.post(f"/v1/models/{name}/load", json={})
        assert answer.status_code == 200 and answer.json()["state"] == "loaded", answer.text


def test_a_request_loads_its_model_and_the_least_recently_used_goes(http: httpx.Client) -> None:
    for name in ("a", "b", "a", "c"):
        answer = ask(http, name)
        assert text_of(answer) == expected("hello", 12) and answer.json()["model"] == name
    found = states(http)
    assert (found["a"], found["b"], found["c"]) == ("loaded", "unloaded", "loaded")


def test_aliases_the_query_and_the_header_name_a_model(http: httpx.Client) -> None:
    load(http, "a", "c")
    assert ask(http, "also-a").json()["model"] == "a"
    assert http.get("/health", params={"model": "c"}).json()["models"]["c"]["state"] == "loaded"  # of all: the front's
    assert http.get("/get_model_info", params={"model": "c"}).status_code == 200
    told = http.post("/tokenize", json={"prompt": "abc"}, headers={"x-minisgl-model": "c"})
    assert told.status_code == 200 and told.json()["count"] == 3


def test_the_list_has_states_and_what_is_known(http: httpx.Client) -> None:
    load(http, "a")
    card = http.get("/v1/models/a").json()
    assert card["max_model_len"] == 8001 and card["aliases"] == ["also-a"] and card["size"] == 0
    until(lambda: http.get("/v1/models/a").json()["memory"] > 10**7, "its memory is not measured")
    assert http.get("/v1/models/nobody").status_code == 404


def test_ollama_s_clients_see_all_models(http: httpx.Client) -> None:
    load(http, "a", "c")
    known, loaded = (http.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
    assert [one["name"] for one in known] == list(states(http)) and len({one["digest"] for one in known}) == len(known)
    assert [one["name"] for one in loaded] == ["a", "c"] and loaded[0]["context_length"] == 8001
    assert states(http)["b"] == "unloaded" and http.get("/api/version").json()["version"]
    body = {"model": "c:latest", "prompt": "hello", "raw": True, "options": {"seed": 0, "num_predict": 12}}
    assert http.post("/api/generate", json={**body, "stream": False}).json()["response"] == expected("hello", 12)
    unknown = http.post("/api/chat", json={"model": "nobody", "messages": []})
    assert unknown.status_code == 404 and "there are a, b, c" in unknown.json()["error"]


def test_impossible_requests_get_an_error(http: httpx.Client) -> None:
    unknown = ask(http, "nobody")
    assert unknown.status_code == 404 and "there are a, b, c" in unknown.json()["error"]["message"]
    large = ask(http, "large")
    assert large.status_code == 400 and large.json()["error"]["code"] == "model_too_large"
    assert "needs 381 MiB, and all models may take 315 MiB" in large.json()["error"]["message"]
    gone = ask(http, "gone")
    assert gone.status_code == 503 and "gone.gguf" in gone.json()["error"]["message"]
    broken = ask(http, "broken")
    assert broken.status_code == 503 and "broken.gguf" in broken.json()["error"]["message"], broken.text
    assert broken.json()["error"]["code"] == "model_not_loaded" and broken.headers["retry-after"]
    anthropic = http.post("/v1/messages", json={"model": "nobody", "messages": []})
    assert anthropic.json()["error"]["type"] == "not_found_error"


def test_keys_hold_for_all_models(server: ServerProcess, http: httpx.Client) -> None:
    load(http, "a")
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as stranger:
        assert stranger.get("/v1/models").status_code == 401 and ask(stranger, "b").status_code == 401
        user = {"authorization": "Bearer user"}
        refused = stranger.post("/v1/models/a/unload", json={}, headers=user)
        assert refused.status_code == 403 and "models: true" in refused.json()["error"]["message"]
        assert stranger.post("/v1/completions", json={"model": "a", "prompt": "x"}, headers=user).status_code == 200
        assert stranger.get("/livez").status_code == stranger.get("/readyz").status_code == 200
    foreign = http.post("/v1/completions", json={"model": "b"}, headers={"origin": "https://elsewhere.example"})
    assert foreign.status_code == 403


def test_a_request_id_is_the_same_on_both_sides(server: ServerProcess, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "a", "prompt": "x"}, headers={"x-request-id": "mine-7"})
    assert answer.headers.get_list("x-request-id") == ["mine-7"]
    until(lambda: any("a: request request_id=mine-7" in line for line in server.lines), "its server has no line of it")
    assert sum("request_id=mine-7" in line for line in server.lines) == 1


def test_figures_are_of_each_model(http: httpx.Client) -> None:
    load(http, "a", "c")
    lines = http.get("/metrics").text.splitlines()
    assert any(line.startswith('minisgl:engine_up{model_name="a"} 1') for line in lines)
    assert 'minisgl:model_loaded{model_name="c"} 1.0' in lines and 'minisgl:model_loaded{model_name="b"} 0.0' in lines
    assert len([line for line in lines if line.startswith("# TYPE minisgl:engine_up ")]) == 1
    assert set(http.get("/stats").json()["models"]) == {"a", "c"}
    assert http.get("/health").json()["memory"]["budget"] == 330_000_000


def test_a_model_that_streams_is_not_unloaded(http: httpx.Client, slow: Path) -> None:
    load(http, "a", "b")
    want = expected("stream", LONG, to_the_end=True)
    body = {"model": "a", "prompt": "stream", "max_tokens": LONG, "stream": True, "ignore_eos": True, "seed": 0}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        first = next(events)
        assert ask(http, "c").status_code == 200  # b has gone for it
        found = states(http)
        assert found["a"] == "loaded" and found["b"] == "unloaded"
        refused = http.post("/v1/models/a/unload", json={})
        assert refused.status_code == 409 and "used by 1 requests" in refused.json()["error"]["message"]
        slow.write_text("0")
        lines = [first, *events]
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == want


def test_a_client_that_leaves_ends_its_request_and_its_lease(http: httpx.Client, slow: Path) -> None:
    load(http, "a")
    body = {"model": "a", "prompt": "left", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    until(lambda: http.get("/health").json()["models"].get("a", {}).get("requests") == 0, "its lease is still held")
    slow.write_text("0")
    running = lambda: http.get("/stats").json()["models"].get("a", {}).get("load", {}).get("num_running")  # noqa: E731
    until(lambda: running() == 0, "its server still computes it")


def test_a_server_that_is_killed_cuts_its_streams_with_an_error_and_is_started_again(
    server: ServerProcess, http: httpx.Client, slow: Path
) -> None:
    load(http, "a")
    body = {"model": "a", "prompt": "cut", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        events = stream.iter_lines()
        next(events)
        kill(server, "a")
        last = [line for line in events if line][-2:]
    assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert last[1] == "data: [DONE]"
    slow.write_text("0")
    assert text_of(ask(http, "a")) == expected("hello", 12)


def kill(server: ServerProcess, name: str) -> None:
    """The HTTP process of the model's server, which was loaded last of its name."""
    ready = re.compile(rf"\b{name}: ready: http://127.0.0.1:(\d+)")
    ports = [found[1] for line in server.lines if (found := ready.search(line))]
    for child in psutil.Process(server.process.pid).children():
        if any(str(one.laddr.port) == ports[-1] for one in child.net_connections() if one.status == "LISTEN"):
            os.kill(child.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no process listens for {name}")


def test_an_engine_that_is_killed_ends_its_server_and_the_next_request_starts_it(
    server: ServerProcess, http: httpx.Client
) -> None:
    load(http, "a")
    before = http.get("/metrics").text.count("\n")
    assert before
    children = psutil.Process(server.process.pid).children()
    engines = [engine for child in children for engine in child.children()]
    for engine in engines:
        engine.kill()
    until(lambda: set(states(http).values()) == {"unloaded"}, "servers without engines are still loaded")
    assert text_of(ask(http, "a")) == expected("hello", 12)


def test_an_answer_that_is_kept_is_found_at_its_model(server: ServerProcess, http: httpx.Client) -> None:
    load(http, "a", "c")
    kept = http.post(
        "/v1/responses", json={"model": "c", "input": "keep", "max_output_tokens": 16, "store": True}
    ).json()
    assert http.get(f"/v1/responses/{kept['id']}").json()["model"] == "c"
    assert http.get(f"/v1/responses/{kept['id']}/input_items").status_code == 200
    user = {"authorization": "Bearer user"}
    assert http.get(f"/v1/responses/{kept['id']}", headers=user).status_code == 404
    assert http.delete(f"/v1/responses/{kept['id']}").status_code == 200
    assert http.get(f"/v1/responses/{kept['id']}").status_code == 404


def test_random_requests_are_exact(http: httpx.Client) -> None:
    def one(i: int) -> None:
        name, prompt = "abc"[i * 7 % 3], f"prompt {i}"
        assert text_of(ask(http, name, prompt, max_tokens=20, seed=i)) == expected(prompt, 20, i), (name, i)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(24)))


def test_a_body_in_chunks_and_bad_bodies(server: ServerProcess, http: httpx.Client) -> None:
    load(http, "a")
    pieces = iter([b'{"model": "a", "prom', b'pt": "hello", "max_tokens": 12, "seed": 0}'])
    answer = http.post("/v1/completions", content=pieces, headers={"content-type": "application/json"})
    assert text_of(answer) == expected("hello", 12)
    bad = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert bad.status_code == 400 and "not valid JSON" in bad.json()["error"]["message"]
    assert http.head("/v1/models").status_code == 200
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), WAIT_S) as plain:
        plain.sendall(b"GET /get_model_info?model=a HTTP/1.0\r\nAuthorization: Bearer admin\r\n\r\n")
        told = b""
        while part := plain.recv(65536):
            told += part
    assert told.startswith(b"HTTP/1.1 200") and b"\r\n\r\n{" in told


def test_sigterm_lets_a_stream_end_and_leaves_nothing(tmp_path: Path) -> None:
    file = write_models(tmp_path / "models.yaml", [echo("a", preload=True)])
    (tmp_path / "delay").write_text("500")  # a stream that no machine is too slow to find alive
    server = ServerProcess(["--models", file], {"MINISGL_STEP_DELAY_FILE": str(tmp_path / "delay")})
    try:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            until(lambda: http.get("/readyz").status_code == 200, "what is preloaded never is")
            assert states(http) == {"a": "loaded"}
            body = {"model": "a", "prompt": "last", "max_tokens": 60, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as stream:
                events = stream.iter_lines()
                next(events)
                server.process.send_signal(signal.SIGTERM)
                until(lambda: any("draining" in line for line in server.lines), "it does not drain")
                (tmp_path / "delay").write_text("0")
                assert list(events)[-2] == "data: [DONE]"
        assert server.process.wait(WAIT_S) == 0
        until(lambda: not list(Path(server.folder).iterdir()), "files are left behind")
    finally:
        server.kill()


def test_servers_end_with_the_process_at_the_port(tmp_path: Path) -> None:
    server = ServerProcess(["--models", write_models(tmp_path / "models.yaml", [echo("a", pin=True)])])
    try:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            until(lambda: http.get("/readyz").status_code == 200, "what is pinned never is there")
        children = server.children()
        assert len(children) == 3, "a server, its engine, and what forks them"
        server.process.kill()
        assert psutil.wait_procs(children, timeout=WAIT_S)[1] == []
    finally:
        server.kill()


def test_batches_need_a_state_folder(http: httpx.Client) -> None:
    before = states(http)
    for answer in (http.get("/v1/batches"), http.post("/v1/files", files={"file": b"{}"}), http.get("/v1/files/a")):
        assert answer.status_code == 501 and "--state-dir DIR" in answer.json()["error"]["message"]
    assert states(http) == before  # none is loaded for it
