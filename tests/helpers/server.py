"""A frontend on a free loopback port, with an engine of scripted replies behind its real sockets.

The prompt says what the engine replies: "say:TEXT" sends TEXT byte by byte and an EOS, "hang:TEXT" sends TEXT and then
nothing until it is told to end, "fail:TEXT" ends with an error after TEXT, "burst:TEXT" sends all of TEXT at once,
"fill:" sends `FILL` times an x and then hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np
import uvloop
import zmq

from minisgl.config import EngineConfig, ServerConfig
from minisgl.frontend.engine_client import ProcessClient
from minisgl.message import (
    AbortRequest,
    AddRequest,
    EngineReady,
    EngineStats,
    FinishRequest,
    FromEngine,
    Heartbeat,
    Shutdown,
    StepTokens,
    ToEngine,
    decode_to_engine,
    encode,
)
from minisgl.server.app import Application, build_app
from minisgl.server.http import HttpServer
from minisgl.step import FinishReason
from minisgl.tokenizer import Tokenizer

MODEL = "scripted"
CONFIG = ServerConfig(engine=EngineConfig(model=MODEL))
EOS = 256
VOCAB_SIZE = 258
FILL = 480
MAX_SEQ_LEN = 512
WAIT_S = 60.0  # for what must come; a failure, not a measurement
PROBE_AFTER_S = 0.01  # of clients that have closed their half of the connection
_ORDER = re.compile(rb"(say|hang|fail|burst|fill):(.*?)(?:</user>|$)", re.DOTALL)
T = TypeVar("T")

READY = EngineReady(
    engine="scripted",
    model_dir=None,
    vocab_size=VOCAB_SIZE,
    max_seq_len=MAX_SEQ_LEN,
    eos_ids=(EOS,),
    num_pages=64,
    page_size=16,
    device="none",
    dtype="none",
    cpu_backend="none",
)
STATS = EngineStats(
    num_waiting=2,
    num_running=3,
    num_pages=64,
    num_free_pages=40,
    num_evictable_pages=8,
    num_protected_pages=10,
    num_held_pages=6,
    num_retracted_total=5,
    num_prompt_tokens_total=700,
    num_cached_tokens_total=300,
    num_steps_total=900,
)


def prompt_ids(request: AddRequest) -> list[int]:
    return [int(token) for token in np.frombuffer(request.tokens, np.int32)]


def prompt_text(request: AddRequest) -> str:
    return bytes(token for token in prompt_ids(request) if token < 256).decode()


def one_token(req_id: int, token: int, reason: FinishReason = FinishReason.NONE) -> StepTokens:
    """A step of one row."""
    return StepTokens(
        step=0,
        req_ids=np.array([req_id], np.int64).tobytes(),
        tokens=np.array([token], np.int32).tobytes(),
        reasons=np.array([reason], np.int32).tobytes(),
    )


def failed_step(req_id: int, error: str) -> StepTokens:
    """The end of a request whose forward failed."""
    return msgspec.structs.replace(one_token(req_id, -1, FinishReason.ERROR), errors={req_id: error})


@dataclass
class _Live:
    request: AddRequest
    kind: str
    tokens: list[int]
    sent: int = 0


@dataclass
class ScriptedEngine:
    """The engine process's side of the protocol, in a thread. `received` is every message, in order."""

    to_engine: str
    from_engine: str
    ready: EngineReady | None = READY
    beats: bool = True
    received: list[ToEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._live: dict[int, _Live] = {}
        self._seen: list[list[int]] = []
        self._step = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for tests

    def send(self, *messages: FromEngine) -> None:
        self._outbox.put(encode(messages))

    def send_frame(self, frame: bytes) -> None:
        self._outbox.put(frame)

    def wait_for(self, found: Callable[[list[ToEngine]], T | None]) -> T:
        """The first true answer of `found` to the messages received so far."""
        with self._changed:
            answer = self._changed.wait_for(lambda: found(self.received), WAIT_S)
        assert answer, "never came; received: " + ", ".join(f"{type(one).__name__}" for one in self.received[-20:])
        return answer

    def wait_for_end(self, kind: type[AbortRequest] | type[FinishRequest], req_ids: set[int]) -> None:
        self.wait_for(lambda all_: req_ids <= {one.req_id for one in all_ if isinstance(one, kind)})

    def requests(self, marker: str) -> list[AddRequest]:
        """Those whose prompt has `marker`."""
        with self._changed:
            return [one for one in self.received if isinstance(one, AddRequest) and marker.encode() in _bytes(one)]

    def wait_for_request(self, marker: str) -> AddRequest:
        return self.wait_for(lambda _: self.requests(marker))[0]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
            inbox.connect(self.to_engine)
            outbox.setsockopt(zmq.LINGER, 0)
            outbox.connect(self.from_engine)
            if self.ready is not None:
                outbox.send(encode([self.ready]))
            beat_at = 0.0
            while not self._stop.is_set():
                if self.beats and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + 0.5
                    outbox.send(encode([Heartbeat("idle", 0.0)]))
                if inbox.poll(0 if self._busy() else 5):
                    self._take(decode_to_engine(inbox.recv()))
                while not self._outbox.empty():
                    outbox.send(self._outbox.get())
                for message in self._advance():
                    outbox.send(encode([message]))

    def _busy(self) -> bool:
        return any(one.sent < len(one.tokens) or one.kind != "hang" for one in self._live.values())

    def _take(self, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                found = _ORDER.search(_bytes(message))
                kind, text = found.groups() if found else (b"say", b"ok")
                tokens = [*text] + ([EOS] if kind in (b"say", b"burst") else [])
                if kind == b"fill":
                    kind, tokens = b"hang", [ord("x")] * FILL
                self._live[message.req_id] = _Live(message, kind.decode(), tokens)
            elif not isinstance(message, Shutdown):
                self._live.pop(message.req_id, None)
        with self._changed:
            self.received.extend(messages)
            self._changed.notify_all()

    def _advance(self) -> Iterator[StepTokens]:
        """One step of every live request; several for a burst."""
        for one in list(self._live.values()):
            if one.kind == "burst":  # in one frame, so that its reader finds all of it at once
                many = []
                while one.request.req_id in self._live:
                    many.append(self._step_of([one]))
                self._outbox.put(encode(many))
        if rows := [one for one in self._live.values() if one.sent < len(one.tokens) or one.kind != "hang"]:
            yield self._step_of(rows)

    def _step_of(self, rows: list[_Live]) -> StepTokens:
        bound = [one for one in rows if one.sent == 0]
        cached = [self._match(prompt_ids(one.request)) for one in bound]
        entries = [self._next(one) for one in rows]
        self._step += 1
        return StepTokens(
            step=self._step,
            req_ids=np.array([one.request.req_id for one in rows], np.int64).tobytes(),
            tokens=np.array([token for token, _ in entries], np.int32).tobytes(),
            reasons=np.array([reason for _, reason in entries], np.int32).tobytes(),
            admitted_ids=np.array([one.request.req_id for one in bound], np.int64).tobytes(),
            cached_lens=np.array(cached, np.int32).tobytes(),
            errors={
                one.request.req_id: "scripted failure"
                for one, (_, reason) in zip(rows, entries, strict=True)
                if reason == FinishReason.ERROR
            },
        )

    def _next(self, one: _Live) -> tuple[int, FinishReason]:
        if one.sent == len(one.tokens):
            del self._live[one.request.req_id]
            return -1, FinishReason.ERROR  # only "fail" comes here
        token = one.tokens[one.sent]
        one.sent += 1
        stops = {EOS, *one.request.sampling.stop_token_ids} - ({EOS} if one.request.sampling.ignore_eos else set())
        reason = FinishReason.NONE
        if token in stops:
            reason = FinishReason.STOP
        elif one.sent == one.request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason:
            del self._live[one.request.req_id]
        return token, reason

    def _match(self, ids: list[int]) -> int:
        """A prefix cache with pages of one token and room for everything."""
        best = 0
        for seen in self._seen:
            same = 0
            while same < min(len(seen), len(ids) - 1) and seen[same] == ids[same]:
                same += 1
            best = max(best, same)
        self._seen.append(ids)
        return best


def _bytes(request: AddRequest) -> bytes:
    return bytes(token for token in prompt_ids(request) if token < 256)


class Frontend:
    """Use `frontend()`."""

    def __init__(
        self, *, ready: bool = True, config: ServerConfig = CONFIG, defaults: dict[str, Any] | None = None
    ) -> None:
        self._config = config
        self._defaults = defaults
        self._folder = Path(tempfile.mkdtemp(prefix="minisgl-test-"))
        self._wait_ready = ready
        self._started = threading.Event()
        self._error: BaseException | None = None
        self.client: ProcessClient
        self.engine: ScriptedEngine
        self.app: Application
        self.connections: set[Any]
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

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S)

    def on_loop(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's event loop."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until `condition`, asked between other work of the event loop, holds."""

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
        to_engine, from_engine = (f"ipc://{self._folder / name}" for name in ("to", "from"))
        self.client = ProcessClient(to_engine, from_engine)
        self.client.start()
        self.engine = ScriptedEngine(to_engine, from_engine, READY if self._wait_ready else None)
        if self._wait_ready and self.client.ready is not None:
            await self.client.ready
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)  # little hides what a client does not read
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            app = build_app(self.client, Tokenizer.echo(), self._config, self._defaults)
            self.app = app
            http = HttpServer(app.middleware, listener, self._config.limits, probe_after_s=PROBE_AFTER_S)
            await http.start()
            self.connections = http.connections
            self._started.set()
            await self._stopping.wait()
            await http.stop()
            await self.client.close()
            self.engine.stop()


@contextlib.contextmanager
def frontend(
    *, ready: bool = True, config: ServerConfig = CONFIG, defaults: dict[str, Any] | None = None
) -> Iterator[Frontend]:
    """A server for the length of a `with`; `defaults` are the model's, of sampling."""
    server = Frontend(ready=ready, config=config, defaults=defaults)
    try:
        yield server
    finally:
        server.stop()


# ------------------------------------------------------------------------------------------------------ what is read


def events(text: str) -> list[Any]:
    """Server-sent events: JSON objects, then "[DONE]"."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "an event without its end"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def check_error(response: httpx.Response, status: int | None = None) -> dict[str, Any]:
    """OpenAI's error shape; returns its inside."""
    assert response.headers["content-type"] == "application/json", response.text
    body = response.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"], error
    assert isinstance(error["message"], str) and error["message"]
    assert status is None or response.status_code == status, (response.status_code, error)
    return error


def chat_body(content: object, **more: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
