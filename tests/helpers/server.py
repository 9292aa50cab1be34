"""Front end on a free loopback port, with an engine of scripted replies behind its real sockets.

Re-exports the names of that engine (scripted_engine.py), so that a test of the server imports one module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvloop

from minisgl._rust import Gateway
from minisgl.config import EngineConfig, ServerConfig, Silence
from minisgl.frontend.engine_client import ProcessClient
from minisgl.message import AbortRequest
from minisgl.server.app import Application, build_app
from minisgl.server.core.http import GRACE_S, HttpServer
from minisgl.server.gateway import FrontEnd
from minisgl.server.gateway_config import encoded
from minisgl.tokenizer import Tokenizer
from tests.helpers.scripted_engine import (
    EOS,
    FILL,
    MAX_SEQ_LEN,
    READY,
    STATS,
    VOCAB_SIZE,
    WAIT_S,
    ScriptedEngine,
    failed_step,
    one_token,
    prompt_ids,
    prompt_text,
)

__all__ = [
    "CONFIG",
    "EOS",
    "FILL",
    "Frontend",
    "MAX_SEQ_LEN",
    "MODEL",
    "READY",
    "STATS",
    "ScriptedEngine",
    "VOCAB_SIZE",
    "WAIT_S",
    "chat_body",
    "check_error",
    "events",
    "failed_step",
    "frontend",
    "hanging",
    "one_token",
    "post",
    "prompt_ids",
    "prompt_text",
    "read_all",
    "read_until",
    "until_in_time",
]

MODEL = "scripted"
PATIENT = Silence(head_wait=WAIT_S)  # a slow machine changes no status
CONFIG = ServerConfig(engine=EngineConfig(model=MODEL), silence=PATIENT)
PROBE_AFTER_S = 0.01  # of clients that have closed their half of the connection
T = TypeVar("T")


class Frontend:
    """Front end under test; use `frontend()`. `defaults`: the model's sampling defaults. `front_end`: the owner of the
    port. `num_engines`: the engine acts as a pool of this size. `vocab_size`: the model's, if not the tokenizer's.
    `engine`: its name; `cpu` supports embeddings. `sees`: it accepts images, as `model_dir` describes them."""

    def __init__(
        self,
        *,
        ready: bool = True,
        config: ServerConfig = CONFIG,
        defaults: dict[str, Any] | None = None,
        front_end: str = "python",
        num_engines: int | None = None,
        replies: Mapping[str, str] | None = None,
        marks: Mapping[int, list[int]] | None = None,
        max_seq_len: int = MAX_SEQ_LEN,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        engine: str = READY.engine,
        model_dir: str | None = None,
        sees: bool = False,
    ) -> None:
        self._tokenizer = tokenizer or Tokenizer.echo()
        if vocab_size is None:
            vocab_size = VOCAB_SIZE if tokenizer is None else tokenizer.num_ids
        self._engine_ready = msgspec.structs.replace(
            READY,
            max_seq_len=max_seq_len,
            vocab_size=vocab_size,
            engine=engine,
            device="cpu",
            model_dir=model_dir,
            sees=sees,
        )
        self._config = msgspec.structs.replace(config, silence=PATIENT) if config.silence == Silence() else config
        self._num_engines = num_engines
        self._replies, self._marks = replies or {}, marks or {}
        self._defaults = defaults
        self._front_end = front_end
        self.gateway: Gateway | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="minisgl-test-"))
        self._wait_ready = ready
        self._started = threading.Event()
        self._error: BaseException | None = None
        self.client: ProcessClient
        self.engine: ScriptedEngine
        self.app: Application
        self.connections: set[Any]
        self.http_server: HttpServer
        self.url = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(WAIT_S)
        if self._error is not None:
            raise self._error

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    @property
    def num_live(self) -> int:
        """Return the requests in the engine, of Python's server and of the gateway."""
        return self.client.num_live + (0 if self.gateway is None else self.gateway.readings()["num_live"])

    @property
    def waiting(self) -> tuple[int, int]:
        """Return the queued requests without a row, and their prompt tokens, of Python's server and of the gateway."""
        here, there = self.client.processor, None if self.gateway is None else self.gateway.readings()
        if there is None:
            return here.num_waiting, here.num_waiting_tokens
        return here.num_waiting + there["num_waiting"], here.num_waiting_tokens + there["num_waiting_tokens"]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S)

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, WAIT_S)
        connection.sendall(sent)
        return connection

    def send(self, path: str, body: object, *head: str) -> socket.socket:
        """Send a POST on a new connection and return that; closing it is a disconnect."""
        content = json.dumps(body).encode()
        lines = (f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}", *head, "", "")
        return self.connect("\r\n".join(lines).encode() + content)

    def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def on_loop(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's event loop."""

        async def run() -> T:
            return work()

        return self.awaited(run())

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Let the event loop run nothing during the `with`."""
        go_on = threading.Event()
        self._loop.call_soon_threadsafe(go_on.wait)
        try:
            yield
        finally:
            go_on.set()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, checking it between other work of the event loop."""

        async def run() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S + 1)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        shutil.rmtree(self._folder)

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:  # for the test's own thread to raise
            self._error = error
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        address = f"ipc://{self._folder / 'engine'}"
        self.client = ProcessClient(address, num_engines=self._num_engines)
        self.client.start()
        ready = self._engine_ready if self._wait_ready else None
        self.engine = ScriptedEngine(address, ready, replies=self._replies, marks=self._marks)
        if self._wait_ready and self.client.ready is not None:
            await self.client.ready
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)  # little hides what a client does not read
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with FrontEnd.open(self._front_end, listener, self._folder, str(self._folder / "engine")) as front_end:
                await self._serve_behind(front_end)

    async def _serve_behind(self, front_end: FrontEnd) -> None:
        tokenizer, defaults = self._tokenizer, self._defaults or {}
        app = build_app(self.client, tokenizer, self._config, defaults, front_end.gateway)
        self.app, self.gateway = app, front_end.gateway
        http = HttpServer(app.middleware, front_end.listener, self._config.limits, probe_after_s=PROBE_AFTER_S)
        await http.start()
        self.connections, self.http_server = http.connections, http
        if self.gateway is not None and app.preparing is not None and self._wait_ready:
            app.preparing.start()
            await asyncio.to_thread(self.gateway.serve, encoded(self._config).decode(), tokenizer.text)
            app.context.opening = False
            await asyncio.to_thread(self._wait_for_the_gateway, http)
        if app.batches is not None:
            app.batches.start()
        self._started.set()
        await self._stopping.wait()
        if app.batches is not None:
            await app.batches.stop()
        await asyncio.gather(http.stop(), front_end.stop(GRACE_S))
        if app.preparing is not None:
            app.preparing.stop()
        await self.client.close()
        self.engine.stop()

    def _wait_for_the_gateway(self, server: HttpServer) -> None:
        """Wait until the gateway answers requests itself."""
        state = server.server.server_state
        deadline = time.monotonic() + WAIT_S
        with self.http() as http:
            while True:
                before = state.total_requests
                assert http.get("/readyz").status_code == 200
                if state.total_requests == before:
                    return
                assert time.monotonic() < deadline, "the gateway passes everything on"


@contextlib.contextmanager
def frontend(**settings: Any) -> Iterator[Frontend]:
    """Run a server during the `with`."""
    server = Frontend(**settings)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def hanging(server: Frontend, marker: str, *head: str, **body: Any) -> Iterator[None]:
    """Keep a request waiting in the engine for its first step during the `with`."""
    with server.send("/v1/completions", {"prompt": f"{marker} hang:", **body}, "content-type: application/json", *head):
        request = server.engine.wait_for_request(marker)
        yield
    server.engine.wait_for_end(AbortRequest, {request.req_id})


# ------------------------------------------------------------------------------------------------------ what is read


def read_all(connection: socket.socket, *, or_reset: bool = False) -> bytes:
    """Read until the server closes the connection; `or_reset`: it may reset it, having left bytes of ours unread."""
    data = b""
    with contextlib.suppress(*([ConnectionResetError] if or_reset else [])):
        while part := connection.recv(65536):
            data += part
    return data


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def data_of(line: str) -> str:
    """Return the data of a line of a stream; "" for an empty line and for a comment (a keep-alive)."""
    assert not line or line.startswith((":", "data: ")), line
    return line.removeprefix("data: ") if line.startswith("d") else ""


def events(text: str) -> list[Any]:
    """Return the events of a stream: JSON objects, then "[DONE]". Comments are omitted."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "an event without its end"
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def check_error(response: httpx.Response, status: int | None = None) -> dict[str, Any]:
    """Assert that the response is an error in OpenAI's format; return its `error` object."""
    assert response.headers["content-type"] == "application/json", response.text
    body = response.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"], error
    assert isinstance(error["message"], str) and error["message"]
    assert status is None or response.status_code == status, (response.status_code, error)
    return error


def until_in_time(ask: Callable[[], T], is_in_time: Callable[[T], bool]) -> T:
    """Return the result of `ask`, repeated while the machine was stalled for longer than the limit allows."""
    deadline = time.monotonic() + WAIT_S
    while not is_in_time(found := ask()) and time.monotonic() < deadline:
        pass
    return found


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    """Send a request that must succeed; return the response's JSON."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat_body(content: object, **more: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
