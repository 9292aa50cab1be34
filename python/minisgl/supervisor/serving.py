"""The life of a server: this process does HTTP and text, a child process is the engine.

Invariants: the death of the child ends the server with a message and a non-zero code; SIGTERM lets running answers end,
Ctrl-C or a second signal does not, all with exit code 0; no process, socket or file is left behind. A program that
starts a server with `--managed` gets one JSON line when it is ready, and stops it by closing its standard input; the
port of several models gets further lines with the use of each API key.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import uvloop

from minisgl.config import MODEL_SMOLLM2, ConfigError, ServerConfig
from minisgl.frontend.engine_client import SHUTTING_DOWN, EngineGone, ProcessClient
from minisgl.frontend.generation_config import read_defaults, show_defaults
from minisgl.frontend.warming import NotKept, load_adapters, warm
from minisgl.message import EngineReady
from minisgl.runner.launch import EngineProcess
from minisgl.runner.several import EngineProcesses
from minisgl.server import gateway_config
from minisgl.server.admin.health import Starting
from minisgl.server.app import Application, build_app
from minisgl.server.core.callers import binds_loopback
from minisgl.server.core.http import GRACE_S, HttpServer
from minisgl.server.core.log import complain, narrate, report, say, warn
from minisgl.server.core.middleware import Middleware
from minisgl.server.gateway import FrontEnd
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.early import EarlyTokenizer
from minisgl.tokenizer.reference import ReferenceTokenizer
from minisgl.utils import prefix_file
from minisgl.utils.memory import give_back
from minisgl.utils.progress import Display, to_all

if TYPE_CHECKING:
    from minisgl._rust import Gateway

DRAINED_S = 0.02  # polling interval
DEMO_STOP_S = 5.0
LAST_WORDS_S = 0.5  # at most, between the ends of a process and its connection
Engines: TypeAlias = EngineProcess | EngineProcesses
SWITCH_INTERVAL_S = 0.0002  # not 5 ms, so that the encoding thread gets its turn soon


def serve(config: ServerConfig, front_end: FrontEnd, process: Engines, signals: Sequence[int], began: float) -> int:
    """Serve at `front_end` while the engine process starts, and return the exit code. `signals` came before."""
    return uvloop.run(_supervise(config, front_end, process, signals, began))


class Signals:
    """Signal handlers of a server: SIGTERM sets `drain`; Ctrl-C, or SIGTERM again, sets `stop` too."""

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
    config: ServerConfig, front_end: FrontEnd, process: Engines, came: Sequence[int], began: float
) -> int:
    signals = Signals(came)
    with until_stdin_ends(signals.interrupt) if config.managed else contextlib.nullcontext():
        return await _run(config, front_end, process, signals, began)


async def _run(config: ServerConfig, front_end: FrontEnd, process: Engines, signals: Signals, began: float) -> int:
    client: ProcessClient | None = None
    if is_exposed(config):
        warn(f"--host {config.host}: all that can connect may use every route: give --api-key or --api-key-file")
    starting = Starting(config.model_name)
    early = EarlyTokenizer(config.engine)
    http = HttpServer(Middleware(starting, config), front_end.listener, config.limits)
    try:
        client = _client(process)
        display = Display(report, sys.stderr if config.log_format == "text" and sys.stderr.isatty() else None)
        client.on_progress = to_all(display, starting.report)
        client.on_narration = narrate
        client.start()
        await http.start()
        ready = await _until_ready(client, process, signals.drain)
        if ready is None:
            return 0
        if isinstance(process, EngineProcesses):
            process.keep(warn)
        tokenizer = await asyncio.to_thread(early.take, ready.model_dir, say)
        if not await _warmed(config, client, ready, tokenizer, signals.drain):
            return 0
        return await _serve(
            config, front_end, http, client, ready, tokenizer, process=process, signals=signals, began=began
        )
    except EngineGone as error:
        complain(f"minisgl: the engine did not start: {error}")
        return 1
    except NotKept as error:
        raise ConfigError(str(error)) from error
    finally:
        await front_end.stop(0.0)
        await http.stop(at_once=True)
        process.leave()
        if client is not None:
            await client.close()
        loading = client is None or client.info is None  # it reads no messages yet
        await process.stop(at_once=loading or signals.stop.is_set())


def is_exposed(config: ServerConfig) -> bool:
    """Return True if other machines can use the server without an API key."""
    return config.any_key is None and not binds_loopback(config.host)


def _client(process: Engines) -> ProcessClient:
    if isinstance(process, EngineProcess):
        return ProcessClient(process.address)
    client = ProcessClient(process.address, num_engines=process.number)
    client.on_engine_state = process.heard
    process.open()
    return client


@contextlib.contextmanager
def under_way(*work: Coroutine[Any, Any, object]) -> Iterator[list[asyncio.Future[Any]]]:
    """Run coroutines as tasks during the `with`, and cancel those that are unfinished at its end."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


async def _until_ready(client: ProcessClient, process: Engines, stopping: asyncio.Event) -> EngineReady | None:
    """Wait until the engine is ready; None if a signal comes first. Raises `ConfigError` for an invalid setting,
    `EngineGone` if the engine cannot start for another reason."""
    assert client.ready is not None
    with under_way(process.wait(), stopping.wait()) as others:
        try:
            await asyncio.wait([client.ready, *others], return_when=asyncio.FIRST_COMPLETED)
            if stopping.is_set():
                return None
            if not client.ready.done():
                client.fail("the engine process died while it was loading")
            return await client.ready
        except EngineGone as error:  # the error of the connection has no reason
            words = process.last_words
            if words is not None and words.is_setting:
                raise ConfigError(words.text) from error
            raise EngineGone(str(error) if words is None else words.text) from error


async def _warmed(
    config: ServerConfig, client: ProcessClient, ready: EngineReady, tokenizer: Tokenizer, stopping: asyncio.Event
) -> bool:
    """Load the adapters and compute the prefixes of the configuration. Return False if a signal comes first. Raises
    `NotKept` or `EngineGone`."""
    texts, adapters = config.engine.warm_prefixes, config.engine.lora
    if not texts and not adapters:
        return True

    async def work() -> None:
        if adapters:
            await load_adapters(client, adapters, client.on_progress)
        if texts:
            read = [one if isinstance(one, str) else prefix_file.read_head(one.path).ids for one in texts]
            await warm(client, tokenizer, read, ready.max_seq_len, client.on_progress)

    with under_way(work(), stopping.wait()) as both:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            return False
        await both[0]
        return True


async def _serve(
    config: ServerConfig,
    front_end: FrontEnd,
    http: HttpServer,
    client: ProcessClient,
    ready: EngineReady,
    tokenizer: Tokenizer,
    *,
    process: Engines,
    signals: Signals,
    began: float,
) -> int:
    """Serve from the time the engine is ready until the end, and return the exit code."""
    defaults = read_defaults(ready.model_dir, config.engine.generation_config, config.engine.model)
    if defaults:
        say(f"sampling defaults of the model: {show_defaults(defaults)} (--generation-config none ignores them)")
    pool = process.readings if isinstance(process, EngineProcesses) else None
    app = build_app(client, tokenizer, config, defaults, front_end.gateway, pool)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    http.app = app.middleware
    gc.freeze()  # these objects live as long as the server, so skip them in collections; a start makes little garbage
    give_back()  # loading the tokenizer took half of this process's memory
    app.context.metrics.start()
    if front_end.gateway is not None and app.preparing is not None:
        app.preparing.start()
        await asyncio.to_thread(_open, front_end.gateway, config, tokenizer)
        app.context.opening = False
    if app.batches is not None:
        app.batches.start()
    url = url_of(front_end.address)
    _greet(config, front_end, url, app.context.info, time.monotonic() - began, chats=bool(tokenizer.template_source()))
    demo = _begin_demo(url, config.model_name, config.any_key) if config.demo_load else None
    keys = app.context.keys
    reports = asyncio.ensure_future(keys.tell_forever(_report_use)) if config.tells_use else None
    died = asyncio.ensure_future(_until_gone(client, process))
    stop = asyncio.ensure_future(signals.stop.wait())
    drain = asyncio.ensure_future(signals.drain.wait())
    await asyncio.wait({died, drain}, return_when=asyncio.FIRST_COMPLETED)
    if demo is not None:  # first, so that its requests do not delay the drain
        demo.kill()
        demo.communicate(timeout=DEMO_STOP_S)
    if app.batches is not None:
        await app.batches.stop(engine_died=died.done())
    if stop.done() or signals.stop.is_set():
        say(f"stopped: {_num_open(app, front_end.gateway)} open requests are cut off")
    elif not died.done():
        await _drain(app, front_end.gateway, config.limits.drain_timeout, died, stop)
    if died.done():
        _report_death(client, died.result())
    code = 1 if died.done() else 0
    for wait in (died, stop, drain):
        wait.cancel()
    if front_end.gateway is not None and app.preparing is not None:
        # before the engine is told to end, or right after it died
        await asyncio.to_thread(front_end.gateway.fail, client.failure or SHUTTING_DOWN)
    process.leave()
    client.shut_down()
    app.context.metrics.stop()
    at_once = signals.stop.is_set()
    await asyncio.gather(http.stop(at_once=at_once), front_end.stop(0.0 if at_once else GRACE_S))
    if app.preparing is not None:
        app.preparing.stop()
    if reports is not None:
        reports.cancel()
        with contextlib.suppress(OSError):
            _report_use(keys.readings())
    return code


def _begin_demo(url: str, model: str, api_key: str | None) -> subprocess.Popen[bytes]:
    """Start a process that sends the server a demonstration load. It ends with this process."""
    demo = subprocess.Popen([sys.executable, "-m", "minisgl.bench.demo_load"], stdin=subprocess.PIPE)
    assert demo.stdin is not None
    line = {"url": url, "model": model, "api_key": api_key, "seed": 0}
    with contextlib.suppress(BrokenPipeError):
        demo.stdin.write(json.dumps(line).encode() + b"\n")
        demo.stdin.flush()
    return demo


def _open(gateway: Gateway, config: ServerConfig, tokenizer: Tokenizer) -> None:
    """Let the gateway answer text requests. If that fails it forwards all of them, which is slower."""
    tokenizer.compile_templates()  # not by the first request on the event loop
    try:
        assert not isinstance(tokenizer.text, ReferenceTokenizer)  # a gateway implies the extension
        if not gateway.serve(gateway_config.encoded(config).decode(), tokenizer.text):
            say("gateway: forwards all requests until the engine process answers")
    except (ValueError, OSError) as error:
        warn(f"the gateway forwards every request: {error}")


def _num_open(app: Application, gateway: Gateway | None) -> int:
    """Return the number of requests that are being answered."""
    return app.middleware.num_open + (0 if gateway is None else gateway.num_open)


async def _drain(
    app: Application, gateway: Gateway | None, timeout_s: float, died: asyncio.Future[Any], stop: asyncio.Future[Any]
) -> None:
    """Accept no new requests, and return when the open ones are answered, after `timeout_s` at the latest."""
    app.context.draining = True
    if gateway is not None:
        gateway.drain()  # the Python server refuses forwarded requests

    async def all_answered() -> None:
        while _num_open(app, gateway):
            await app.middleware.idle.wait()
            if _num_open(app, gateway):
                await asyncio.sleep(DRAINED_S)

    num_open = _num_open(app, gateway)
    say(f"draining: {num_open} open requests have {timeout_s:g} s to end; a second signal ends them at once")
    with under_way(all_answered()) as idle:
        await asyncio.wait({died, stop, *idle}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    say(f"drained: {_num_open(app, gateway)} requests are cut off")


async def _until_gone(client: ProcessClient, process: Engines) -> int | None:
    """Wait until the engine process ends or disconnects. Return its exit code, or None if it still runs."""
    with under_way(process.wait(), client.lost.wait()) as both:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(both, timeout=LAST_WORDS_S)  # both events occur together
        exit_code: int | None = both[0].result() if both[0].done() else None
        return exit_code


def _report_death(client: ProcessClient, exit_code: int | None) -> None:
    """Log why the engine process is gone, as far as that is known, and fail all requests."""
    client.fail(
        "the engine process ended the connection"
        if exit_code is None
        else f"the engine process died (exit code {exit_code})"
    )
    complain(f"minisgl: {client.failure}")


def url_of(address: tuple[str, int]) -> str:
    """Return the URL at which this machine reaches a server that listens at `address`."""
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # an address to connect to
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _greet(
    config: ServerConfig, front_end: FrontEnd, url: str, ready: EngineReady, seconds: float, *, chats: bool
) -> None:
    details = f" ({ready.engine_details})" if ready.engine_details else ""
    say(
        f"{config.model_name}: {ready.engine} engine, {ready.device} {ready.dtype}{details}, "
        f"scheduler {ready.cpu_backend}, front end {front_end.name}, context {ready.max_seq_len}, "
        f"KV pool {ready.num_pages} pages of {ready.page_size} tokens, "
        f"EOS ids {', '.join(map(str, ready.eos_ids)) or 'none'}"
    )
    if config.managed:
        say(f"ready: {url} after {seconds:.1f} s")
        _announce(url, config, ready)
        return
    decoding = {"temperature": 0, "max_tokens": 30}
    asks: dict[str, object] = {"prompt": "The capital of France is", **decoding}
    route = "completions"
    if ready.gives_scores:
        say("this model scores texts and generates none")
        route, asks = "score", {"text_1": "What is the capital of France?", "text_2": "Paris."}
    elif ready.kind != "decoder":
        say("this model is an encoder: it returns embeddings and no text")
        route, asks = "embeddings", {"input": "The capital of France"}
    elif chats:
        question = "Name the capital of France." if config.engine.model == MODEL_SMOLLM2 else "Hello!"
        route, asks = "chat/completions", {"messages": [{"role": "user", "content": question}], **decoding}
    else:
        say("this model has no chat template, so it only completes texts (--chat-template FILE adds chats)")
    say(f"ready: {url} after {seconds:.1f} s. Try:")
    body = {"model": config.model_name, **asks}
    key = "" if config.any_key is None else ' -H "Authorization: Bearer $MINISGL_API_KEY"'
    say(f"  curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")


def _announce(url: str, config: ServerConfig, ready: EngineReady) -> None:
    """Print one JSON line for the program that started the server: `url`, `model` (its API name), `key` (a valid API
    key or null), `max_model_len` (tokens of a request) and `vision` (the model sees images)."""
    said = {"url": url, "model": config.model_name, "key": config.any_key}
    print(json.dumps({**said, "max_model_len": ready.max_seq_len, "vision": ready.sees}), flush=True)


def _report_use(readings: list[tuple[int, int]]) -> None:
    print(json.dumps(readings), flush=True)


@contextlib.contextmanager
def until_stdin_ends(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when standard input, which must be a pipe or a socket, is closed by the other side."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stop()

    loop.add_reader(descriptor, readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
