"""nginx and LiteLLM's proxy before two servers, configured as deploy/ shows: what clients of such a proxy see, and what
servers behind it see of clients."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.clients import python_command
from tests.helpers.deploy import DEPLOY
from tests.helpers.e2e import ServerProcess, until
from tests.helpers.seconds import WAIT_S

# Other people's proxies before two servers of the echo engine, each with the configuration that stands in deploy/.
# Invariants: an example names what is put in its place; nothing runs when a `with` ends.
EXAMPLE_SERVERS = ("127.0.0.1:1919", "127.0.0.1:1920")
KEY = "key-of-the-servers"
PROXY_KEY = "sk-key-of-the-proxy"
NUM_ROWS = 2
"""Requests that a server computes at once; one more waits, and beyond that it says 429."""
FLAGS = ("--engine", "echo", "--num-pages", "1024", "--max-seq-len", "4096")
LIMITS = ("--max-running-requests", str(NUM_ROWS), "--max-queued-requests", "1")
SLOW_MS = 200
START_S = 240.0


_PORTS = itertools.count(20_000 + os.getpid() % 10_000)  # below those that the system gives to others meanwhile


def free_port() -> int:
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


class Backend:
    """A server that stays at its port, whatever happens to its process."""

    key = KEY

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="minisgl-delay-")
        self._delay = Path(self._folder.name, "step_ms")
        self.process = self._started()

    def _started(self) -> ServerProcess:
        env = {"MINISGL_API_KEY": KEY, "MINISGL_STEP_DELAY_FILE": str(self._delay)}
        return ServerProcess((*FLAGS, *LIMITS, "--port", str(self.port)), env)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_S)

    def number(self, name: str) -> int:
        with self.http() as http:
            found = re.search(rf"^minisgl:{name}(?:{{.*}})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
        return 0 if found is None else int(float(found[1]))

    def wait_for(self, name: str, value: int) -> None:
        until(lambda: self.number(name) == value, f"{name} does not become {value}")

    def slow_motion(self, step_ms: int) -> None:
        self._delay.write_text(str(step_ms))

    def answered(self, request_id: str) -> bool:
        """Whether its access log has it."""
        return any(request_id in line for line in self.process.lines)

    def die(self) -> None:
        """At once, the HTTP side first, so that it says nothing about its engine's end."""
        children = self.process.children()
        self.process.process.kill()
        self.process.process.wait()
        for child in children:
            with contextlib.suppress(Exception):
                child.kill()

    def again(self) -> None:
        self.process = self._started()


@dataclass
class Proxied:
    """`key`: what the proxy's clients show."""

    url: str
    key: str
    process: subprocess.Popen[bytes]
    backends: list[Backend] = field(default_factory=list)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=WAIT_S)

    @contextlib.contextmanager
    def slow_motion(self) -> Iterator[None]:
        """What has begun goes on at full speed afterwards."""
        for one in self.backends:
            one.slow_motion(SLOW_MS)
        try:
            yield
        finally:
            for one in self.backends:
                one.slow_motion(0)

    def num_running(self) -> int:
        return sum(one.number("requests_running") for one in self.backends)


def sent(url: str, key: str, body: dict[str, Any]) -> socket.socket:
    """A client's connection with a chat on its way; closing it is leaving."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}:{port}",
        f"Authorization: Bearer {key}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    client = socket.create_connection((host, int(port)), WAIT_S)
    client.sendall("\r\n".join([*head, "", ""]).encode() + content)
    return client


def example(name: str, backends: Sequence[Backend], more: dict[str, str] | None = None) -> str:
    """The file of deploy/ with the addresses of these servers."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    places = dict(zip(EXAMPLE_SERVERS, (f"127.0.0.1:{one.port}" for one in backends), strict=True)) | (more or {})
    for here, there in places.items():
        assert here in text, f"{name} does not name {here}"
        text = text.replace(here, there)
    return text


def nginx_program() -> str:
    """Debian puts it where only root's PATH looks."""
    found = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    return found


def nginx_command(folder: Path, port: int, backends: Sequence[Backend]) -> list[str]:
    site = example("nginx/minisgl.conf", backends, {"127.0.0.1:8080": f"127.0.0.1:{port}"})
    (folder / "minisgl.conf").write_text(site, encoding="utf-8")
    user = f"user {pwd.getpwuid(0).pw_name};" if os.getuid() == 0 else ""
    temporary = " ".join(
        f"{what}_temp_path {folder}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    around = f"http {{ access_log off; {temporary} include {folder}/minisgl.conf; }}"
    main = f"daemon off; {user} pid {folder}/pid; error_log stderr; events {{}} {around}"
    (folder / "nginx.conf").write_text(main, encoding="utf-8")
    return [nginx_program(), "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def litellm_command(folder: Path, port: int, backends: Sequence[Backend]) -> list[str]:
    program = Path(python_command("litellm")[0]).with_name("litellm")
    if not program.exists():
        pytest.skip("the environment of litellm is one without its proxy: make client-test makes another")
    config = folder / "config.yaml"
    config.write_text(example("litellm/config.yaml", backends), encoding="utf-8")
    return [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


@contextlib.contextmanager
def proxied(kind: str, folder: Path) -> Iterator[Proxied]:
    """`kind`: nginx, litellm."""
    command, key, alive = {
        "nginx": (nginx_command, KEY, "/livez"),
        "litellm": (litellm_command, PROXY_KEY, "/health/liveliness"),
    }[kind]
    port = free_port()
    backends: list[Backend] = []
    log = folder / "log"
    with contextlib.ExitStack() as stack:
        for _ in EXAMPLE_SERVERS:
            backends.append(Backend())
            stack.callback(lambda one=backends[-1]: one.process.kill())
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"MINISGL_API_KEY": KEY, "LITELLM_MASTER_KEY": PROXY_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        env["LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"] = "True"  # it asks no other host
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(folder, port, backends), env=env, cwd=folder, stdout=output, stderr=output
            )
        stack.callback(end, process)
        running = Proxied(f"http://127.0.0.1:{port}", key, process, backends)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(running.url + alive, timeout=WAIT_S).status_code == 200
            return False

        until(is_up, f"{kind} does not start", START_S)
        yield running


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


pytestmark = pytest.mark.timeout(300)  # a failure, not a measurement
LONG = 1000  # tokens; in slow motion they take longer than anybody waits here


@pytest.fixture(scope="module", params=["nginx", "litellm"])
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with proxied(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


def chat(text: str = "Hello", num_tokens: int = 8, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2", "messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "seed": 7, **more}


def ask(proxy: Proxied, body: dict[str, Any] | None = None, request_id: str | None = None) -> httpx.Response:
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    with proxy.http() as http:
        return http.post("/v1/chat/completions", json=body or chat(), headers=headers)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def pieces(lines: Iterator[str]) -> Iterator[str]:
    """Of a stream, each as it comes; its end must be there."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if piece := choice["delta"].get("content"):
                    yield piece
    raise AssertionError("the stream has no end")


def test_a_chat_is_the_servers_own_whole_and_streamed(proxy: Proxied) -> None:
    body = chat(num_tokens=32)
    with proxy.backends[0].http() as http:
        text = text_of(http.post("/v1/chat/completions", json=body))
    assert text_of(ask(proxy, body)) == text
    with proxy.http() as http, http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert "".join(pieces(response.iter_lines())) == text


def test_a_stream_comes_as_it_is_made(proxy: Proxied) -> None:
    """In slow motion the last token is minutes away: who buffers shows nothing until the time-out."""
    body = chat(num_tokens=LONG, stream=True)
    with proxy.http() as http:
        with proxy.slow_motion():
            stream = http.send(http.build_request("POST", "/v1/chat/completions", json=body), stream=True)
            told = pieces(stream.iter_lines())
            text = next(told) + next(told)
            assert proxy.num_running() == 1
        text += "".join(told)
        stream.close()
    assert text == text_of(ask(proxy, chat(num_tokens=LONG)))


def test_a_request_has_one_id_on_both_sides(proxy: Proxied) -> None:
    request_id = f"test-{uuid.uuid4()}"
    response = ask(proxy, request_id=request_id)
    assert request_id in (response.headers.get("x-request-id"), response.headers.get("llm_provider-x-request-id"))
    until(lambda: any(one.answered(request_id) for one in proxy.backends), "no server logs the client's id")


def test_a_long_prompt_gets_the_servers_own_answer(proxy: Proxied) -> None:
    """2 MiB: more than nginx takes unless told."""
    response = ask(proxy, chat("a" * (1 << 21)))
    assert response.status_code == 400 and "context" in response.json()["error"]["message"], response.text


def test_full_servers_refuse_and_are_asked_again(proxy: Proxied) -> None:
    with proxy.slow_motion():
        with contextlib.ExitStack() as stack:
            for one in proxy.backends:
                for number in range(NUM_ROWS):
                    stack.enter_context(sent(one.url, one.key, chat(num_tokens=LONG)))
                    one.wait_for("requests_running", number + 1)
                stack.enter_context(sent(one.url, one.key, chat(num_tokens=LONG)))
                one.wait_for("requests_waiting", 1)
            response = ask(proxy)
            assert response.status_code == 429, response.text
            found = {response.headers.get(name) for name in ("retry-after", "llm_provider-retry-after")} - {None}
            assert found and all(int(value) >= 1 for value in found if value), dict(response.headers)
        until(lambda: proxy.num_running() == 0, "they still run")
    assert text_of(ask(proxy)), "servers that were full are servers"


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_ends_its_request(proxy: Proxied, streamed: bool) -> None:
    """It would run for minutes."""
    with proxy.slow_motion():
        with sent(proxy.url, proxy.key, chat(num_tokens=LONG, stream=streamed)) as client:
            until(lambda: proxy.num_running() == 1, "it does not run")
            if streamed:
                assert client.recv(1)
        until(lambda: proxy.num_running() == 0, "it still runs")


def test_a_server_that_drains_gets_nothing_new_and_comes_back(proxy: Proxied) -> None:
    first, _ = proxy.backends
    first.slow_motion(SLOW_MS)
    with sent(first.url, first.key, chat(num_tokens=LONG)):
        first.wait_for("requests_running", 1)
        first.process.process.terminate()
        until(lambda: httpx.get(f"{first.url}/readyz", timeout=WAIT_S).status_code == 503, "it does not drain")
        for number in range(4):
            assert text_of(ask(proxy, chat(f"{number}")))
    assert first.process.process.wait(WAIT_S) == 0
    assert text_of(ask(proxy))
    first.again()

    def is_back() -> bool:
        request_id = f"test-{uuid.uuid4()}"
        assert text_of(ask(proxy, request_id=request_id))
        until(lambda: any(one.answered(request_id) for one in proxy.backends), "nobody logs it")
        return first.answered(request_id)

    until(is_back, "it is never asked again")


def test_a_server_that_dies_leaves_all_to_the_other(proxy: Proxied) -> None:
    """The last one of a proxy: it takes a server away. Whose answer had not begun is answered by the other."""
    with ThreadPoolExecutor(1) as threads:
        with proxy.slow_motion():
            waiting = threads.submit(ask, proxy, chat(num_tokens=LONG))
            until(lambda: proxy.num_running() == 1, "it does not run")
            [lost] = [one for one in proxy.backends if one.number("requests_running")]
            lost.die()
            proxy.backends.remove(lost)
            proxy.backends[0].wait_for("requests_running", 1)
        text = text_of(waiting.result(WAIT_S))
    for _ in range(4):
        assert text_of(ask(proxy, chat(num_tokens=LONG))) == text
