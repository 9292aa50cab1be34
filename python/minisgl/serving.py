"""The life of a server: this process is HTTP and text, a child process is the engine.

Keeps true: the death of the child ends the server with a message and a non-zero code; SIGTERM lets running answers end,
Ctrl-C or a second signal does not, all with exit code 0; no process, socket or file is left behind.
Doesn't know: the protocol, scheduling, torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from minisgl import managed
from minisgl.config import MODEL_SMOLLM2, ServerConfig
from minisgl.early_tokenizer import EarlyTokenizer
from minisgl.frontend.engine_client import EngineGone, ProcessClient
from minisgl.frontend.memory import give_back
from minisgl.generation_config import read_defaults, show_defaults
from minisgl.message import EngineReady
from minisgl.progress import Display, to_all
from minisgl.runner.launch import EngineProcess
from minisgl.server.app import Application, build_app
from minisgl.server.health import Starting
from minisgl.server.http import HttpServer
from minisgl.server.log import complain, narrate, say
from minisgl.server.middleware import Middleware
from minisgl.tokenizer import Tokenizer

SWITCH_INTERVAL_S = 0.0002  # the thread that encodes prompts waits as long for a busy event loop, not 5 ms


def serve(
    config: ServerConfig, listener: socket.socket, process: EngineProcess, signals: Sequence[int], began: float
) -> int:
    """Serve on `listener` with the engine process that is starting; returns the exit code. `signals` came already."""
    return uvloop.run(_supervise(config, listener, process, signals, began))


class _Signals:
    """SIGTERM asks to drain; Ctrl-C, or SIGTERM again, to stop at once."""

    def __init__(self, came: Sequence[int]) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        for number in came:
            self.interrupt() if number == signal.SIGINT else self._on_terminate()

    def interrupt(self) -> None:
        self.drain.set()
        self.stop.set()

    def _on_terminate(self) -> None:
        if self.drain.is_set():
            self.stop.set()
        self.drain.set()


async def _supervise(
    config: ServerConfig, listener: socket.socket, process: EngineProcess, came: Sequence[int], began: float
) -> int:
    signals = _Signals(came)
    with managed.until_stdin_ends(signals.interrupt) if config.managed else contextlib.nullcontext():
        return await _run(config, listener, process, signals, began)


async def _run(
    config: ServerConfig, listener: socket.socket, process: EngineProcess, signals: _Signals, began: float
) -> int:
    client: ProcessClient | None = None
    starting = Starting(config.model_name)
    early = EarlyTokenizer(config.engine)
    http = HttpServer(Middleware(starting, config), listener, config.limits)
    try:
        client = ProcessClient(process.to_engine, process.from_engine)
        display = Display(say, sys.stderr if config.log_format == "text" and sys.stderr.isatty() else None)
        client.on_progress = to_all(display, starting.report)
        client.on_narration = narrate
        client.start()
        await http.start()
        ready = await _until_ready(client, process, signals.drain)
        if ready is None:
            return 0
        tokenizer = await asyncio.to_thread(early.take, ready.model_dir, say)
        return await _serve(config, http, client, ready, tokenizer, process=process, signals=signals, began=began)
    except EngineGone as error:
        complain(f"minisgl: the engine did not start: {error}")
        return 1
    finally:
        await http.stop(at_once=True)
        if client is not None:
            await client.close()
        loading = client is None or client.info is None  # then it reads no messages yet
        await process.stop(at_once=loading or signals.stop.is_set())


async def _until_ready(client: ProcessClient, process: EngineProcess, stopping: asyncio.Event) -> EngineReady | None:
    """None if a signal came first. Raises `EngineGone` if the engine cannot start."""
    assert client.ready is not None
    waits: list[asyncio.Future[object]] = [
        asyncio.ensure_future(process.wait()),
        asyncio.ensure_future(stopping.wait()),
    ]
    try:
        first: list[asyncio.Future[Any]] = [client.ready, *waits]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            return None
        if not client.ready.done():  # the child is dead: its last words may still be on their way
            await asyncio.wait({client.ready}, timeout=1.0)
            client.fail("the engine process died while it was loading")
        return await client.ready
    finally:
        for wait in waits:
            wait.cancel()


async def _serve(
    config: ServerConfig,
    http: HttpServer,
    client: ProcessClient,
    ready: EngineReady,
    tokenizer: Tokenizer,
    *,
    process: EngineProcess,
    signals: _Signals,
    began: float,
) -> int:
    """From ready to the end; returns the exit code."""
    defaults = read_defaults(ready.model_dir, config.engine.generation_config)
    if defaults:
        say(f"sampling defaults of the model: {show_defaults(defaults)} (--generation-config none: without)")
    app = build_app(client, tokenizer, config, defaults)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    http.app = app.middleware
    gc.collect()
    gc.freeze()  # what lives now lives as long as the server: collections need not visit it
    give_back()  # what loading a tokenizer took for a moment is half of this process
    app.context.metrics.start()
    _greet(config, http.address, ready, time.monotonic() - began)
    died = asyncio.ensure_future(process.wait())
    stop = asyncio.ensure_future(signals.stop.wait())
    drain = asyncio.ensure_future(signals.drain.wait())
    await asyncio.wait({died, drain}, return_when=asyncio.FIRST_COMPLETED)
    if not died.done() and not stop.done():
        await _drain(app, config.limits.drain_timeout, died, stop)
    if died.done():
        await _last_words(client, died.result())
    code = 1 if died.done() else 0
    for wait in (died, stop, drain):
        wait.cancel()
    client.shut_down()
    app.context.metrics.stop()
    await http.stop(at_once=signals.stop.is_set())
    return code


async def _drain(app: Application, timeout_s: float, died: asyncio.Future[Any], stop: asyncio.Future[Any]) -> None:
    """Take no new requests; return when the open ones are answered, at the latest after `timeout_s`."""
    app.context.draining = True
    middleware = app.middleware
    text = (
        f"draining: {middleware.num_open} open requests have {timeout_s:g} s to end; a second signal ends them at once"
    )
    say(text)
    idle: asyncio.Future[Any] = asyncio.ensure_future(middleware.idle.wait())
    await asyncio.wait({died, stop, idle}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    idle.cancel()
    say(f"drained: {middleware.num_open} requests are cut off")


async def _last_words(client: ProcessClient, exit_code: int) -> None:
    """The engine process is dead: say why, as well as is known."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while client.failure is None:
                await asyncio.sleep(0.01)
    client.fail(f"the engine process died (exit code {exit_code})")
    complain(f"minisgl: {client.failure}")


def _greet(config: ServerConfig, address: tuple[str, int], ready: EngineReady, seconds: float) -> None:
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # what a client on this machine can connect to
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    details = f" ({ready.engine_details})" if ready.engine_details else ""
    say(
        f"{config.model_name}: {ready.engine} engine, {ready.device} {ready.dtype}{details}, "
        f"scheduler {ready.cpu_backend}, context {ready.max_seq_len}, "
        f"KV pool {ready.num_pages} pages of {ready.page_size} tokens"
    )
    if config.managed:
        say(f"ready: {url} after {seconds:.1f} s")
        managed.announce(url, config.model_name)
        return
    say(f"ready: {url} after {seconds:.1f} s. Try:")
    question = "Name the capital of France." if config.engine.model == MODEL_SMOLLM2 else "Hello!"
    messages = [{"role": "user", "content": question}]
    body = {"model": config.model_name, "messages": messages, "temperature": 0, "max_tokens": 30}
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $MINISGL_API_KEY"'
    say(f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
