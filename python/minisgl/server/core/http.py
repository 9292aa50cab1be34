"""HTTP server: uvicorn on a bound socket (the port, or a Unix socket behind the gateway), with connection handling
below ASGI: chunks of a stream are written straight to the transport's buffer.

Invariants: the caller owns signals and binds the listener; `stop` gives running responses a grace period, then aborts
them; a server that ends unexpectedly is restarted; no connection stays open for a client that neither sends nor reads;
a client that half-closes after its request is still answered; a disconnect cancels the task that answers, at the
transport's event. A client that does not read is detected at once, so that no output is formatted for it: the unsent
part of a stream is bounded (its next chunk, and the tokens of its requests, which end), and dropped after a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import select
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.config import Limits
from minisgl.server.core.errors import INVALID, SERVER, ApiError
from minisgl.server.core.request import REQUEST, HttpRequest

CONNECTION = "minisgl.connection"
"""Key of the ASGI scope: the `Connection`."""
GRACE_S = 2
NUM_LISTENERS = 8
RESTART_S = 0.1  # delay after an unexpected end; doubled each time
MAX_RESTART_S = 5.0
MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8  # buffered requests after the current one; more are read later
PROBE_AFTER_S = 1.0  # most responses are complete by then; the next probe follows after a tenth, then intervals double
MAX_PROBES_WAIT = 10  # times `probe_after_s`: maximum interval
_log = logging.getLogger("minisgl.server")
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_AUTHORITY = re.compile(rb"[a-z][a-z0-9+.-]*://(?:[^/?#]*@)?([^/?#]*)", re.IGNORECASE)  # of an absolute-form target
_HTTP_1_0 = "minisgl.http_1_0"  # key of the ASGI scope: uvicorn's cycle of an HTTP/1.0 request


def _nothing() -> None:
    return None


@dataclass(slots=True, eq=False)
class Connection:
    _transport: asyncio.Transport
    _task: asyncio.Task[Any] | None = None
    is_lost: bool = False
    chunked: bool = True
    streams: bool = False
    was_silent: bool = False  # no chunk was written since this was set
    blocked_since: float | None = None  # loop time since which writing is paused
    _on_pause: Callable[[], None] = _nothing
    _on_resume: Callable[[], None] = _nothing

    def cancel_when_lost(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task` when the client disconnects, at once if it already has. `None` unregisters."""
        self._task = task
        if self.is_lost and task is not None:
            task.cancel()

    @contextlib.contextmanager
    def stream(self, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> Iterator[None]:
        """Mark the connection as streaming inside the block; call `on_pause` when the client lags, else `on_resume`."""
        self.streams = True
        self._on_pause, self._on_resume = on_pause, on_resume
        try:
            yield
        finally:
            self.streams = False
            self._on_pause = self._on_resume = _nothing

    def write(self, chunk: bytes) -> None:
        """Write a chunk of a response that has begun (chunked as in RFC 9112, 7.1; raw bytes for HTTP/1.0). Never
        blocks. While paused, only output that is ready already may be written."""
        self.was_silent = False
        if not self.is_lost and chunk:
            self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.chunked else chunk)

    @contextlib.contextmanager
    def kept_alive(self, ping: Callable[[], bytes], longest_s: float) -> Iterator[None]:
        """Write `ping()` inside the block when a stream is idle, so that at most `longest_s` pass without a byte."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def tick() -> None:  # runs each half `longest_s`: silent for one run means at most two
            nonlocal timer
            if not self.was_silent:
                self.was_silent = True
            elif self.blocked_since is None:
                self.write(ping())
            timer = loop.call_later(longest_s / 2, tick)

        timer = loop.call_later(longest_s / 2, tick)
        try:
            yield
        finally:
            timer.cancel()

    def drop(self) -> None:
        """Abort the connection of a response that cannot be completed."""
        self._transport.abort()

    # ----------------------------------------------------------------------------------------- called by the server

    def lost(self) -> None:
        self.is_lost = True
        if self._task is not None:
            self._task.cancel()

    def paused(self, now: float) -> None:
        self.blocked_since = now
        self._on_pause()

    def resumed(self) -> None:
        self.blocked_since = None
        self._on_resume()


class ConnectionLimiter:
    """Limit of open connections: in total, and three quarters of that for one address, so that no single client locks
    out all others. The gateway applies the same limits (`rust/minisgl-gateway/src/http/accept.rs`)."""

    MOST = 16_384
    OTHER_DESCRIPTORS = 100

    def __init__(self, most: int | None = None) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = self.MOST if limit == resource.RLIM_INFINITY else max(0, limit - self.OTHER_DESCRIPTORS) // 2
        self._most = min(self.MOST, free) if most is None else most
        self._num_open = 0
        self._open: dict[str, int] = {}  # connections by address

    def enter(self, address: str) -> bool:
        """Count a new connection from `address`. Returns false, without counting, at a limit. Pair with `leave`."""
        own = self._open.get(address, 0)
        if self._num_open >= self._most or own >= -(-3 * self._most // 4):
            return False
        self._num_open += 1
        self._open[address] = own + 1
        return True

    def leave(self, address: str) -> None:
        self._num_open -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


def _is_reset(transport: asyncio.Transport) -> bool:
    """Return true if the peer has closed both directions; a half-closed socket reports no hang-up (poll(2))."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with changes: errors for invalid HTTP have our shape; endless request lines and headers are
    bounded; headers that do not arrive in time close the connection; all pipelined requests are notified of a
    disconnect; HTTP/1.0 gets no chunks; a half-closed client is answered; trailers after a chunked body are not taken
    for headers; offers to upgrade are not logged; the host of an absolute target replaces `Host`, as RFC 9112 says."""

    head_timeout_s = 60.0
    probe_after_s = PROBE_AFTER_S
    limiter: ConnectionLimiter
    _address: str | None = None  # address under which the connection counts
    _probe_timer: asyncio.TimerHandle | None = None
    _head_bytes = -1  # bytes of the current header; -1 outside of headers
    _head_timer: asyncio.TimerHandle | None = None
    _data = b""  # bytes that are being parsed
    _cycles: tuple[RequestResponseCycle, ...] = ()  # unanswered requests, the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, transport.abort)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):  # else the peer is the gateway, which has limits of its own
            if self.limiter.enter(peer[0]):
                self._address = peer[0]
            else:
                self._refuse(503, "there are as many connections as may be: close some", "too_many_connections")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a client that sends nothing more. After its response has begun, that counts as a disconnect. Before,
        it may have half-closed and be waiting (`printf ... | nc -N`): TCP does not tell. So the request continues, and
        interim responses are sent, which a waiting client skips and a closed one answers with a reset. HTTP/1.0 has no
        interim responses; its clients get them too, since the alternative is to drop them all."""
        open_ = self._unanswered()
        if not open_ or open_[0].response_started or self.cycle.more_body or self._head_bytes >= 0:
            return False
        self.cycle.keep_alive = False
        self._probe_timer = self.loop.call_later(self.probe_after_s, self._probe, self.probe_after_s / 10)
        return True

    def _probe(self, wait_s: float) -> None:
        """Send interim responses, at growing intervals, until the response begins. After that, what this side or a
        proxy writes may cause the reset as well, and is not a probe."""
        if (open_ := self._unanswered()) and not self.transport.is_closing():
            if _is_reset(self.transport):
                self.transport.abort()
                return
            if not open_[0].response_started:
                self.transport.write(_PROBE)
            next_s = min(2 * wait_s, MAX_PROBES_WAIT * self.probe_after_s)
            self._probe_timer = self.loop.call_later(wait_s, self._probe, next_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._address is not None:
            self.limiter.leave(self._address)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        open_ = self._unanswered()
        for cycle in open_:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        for cycle in open_:
            _connection_of(cycle).lost()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[CONNECTION] = Connection(self.transport)  # type: ignore[literal-required]
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_bytes >= 0:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = -1
        self._stop_timer()
        if (target := _AUTHORITY.match(self.url)) is not None:
            self.headers[:] = [(name, target[1] if name == b"host" else value) for name, value in self.headers]
        super().on_headers_complete()
        self._cycles = (*self._unanswered(), self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.scope[_HTTP_1_0] = self.cycle  # type: ignore[literal-required]
        if self.pipeline and len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn pauses reading here, and would miss a disconnect

    def _unanswered(self) -> tuple[RequestResponseCycle, ...]:
        return tuple(cycle for cycle in self._cycles if not cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        if open_ := self._unanswered():
            _connection_of(open_[0]).paused(self.loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        if open_ := self._unanswered():
            _connection_of(open_[0]).resumed()

    def answering(self) -> tuple[str, Connection | None]:
        """Return the id and the connection of the request that is being answered, or "a connection" and `None`."""
        if not (open_ := self._unanswered()):
            return "a connection", None
        request: HttpRequest | None = open_[0].scope.get(REQUEST)  # type: ignore[assignment]
        return "a connection" if request is None else request.request_id, _connection_of(open_[0])

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._head_bytes >= 0 and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"headers: more than {MAX_HEAD_BYTES} bytes", "headers_too_large")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"not a valid HTTP request: {msg}", "invalid_http")

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body follows
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Continue parsing after headers that offer an upgrade, which the parser takes for the end of HTTP: Java's
        client offers HTTP/2 with every request, bodies included. Uvicorn would log that its own extras are missing."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        behind = _AfterUpgrade(self)
        self.parser = httptools.HttpRequestParser(behind)
        framing = (b"%b: %b\r\n" % one for one in self.headers if one[0] in (b"content-length", b"transfer-encoding"))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        behind.is_there = True
        if rest := self._data[upgrade.args[0] :]:
            self._data = rest
            super().data_received(rest)

    def _refuse(self, status: int, message: str, code: str) -> None:
        if (open_ := self._unanswered()) and (open_[0].response_started or open_[0] is not self.cycle):
            self.transport.close()  # another response is due or under way: no second header may interrupt it
            return
        kind = SERVER if status >= 500 else INVALID
        body = bytes(ApiError(status, message, kind=kind, code=code).response().body)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class _AfterUpgrade:
    """Parser callbacks that ignore a repeated header, which `protocol` knows already, and forward what follows."""

    def __init__(self, protocol: _Protocol) -> None:
        self.is_there = False
        self._protocol = protocol
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self.is_there:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.is_there:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_there:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_there:
            self._protocol.on_headers_complete()


def _connection_of(cycle: RequestResponseCycle) -> Connection:
    connection: Connection = cycle.scope[CONNECTION]  # type: ignore[literal-required]
    return connection


def _without_chunks(cycle: RequestResponseCycle, connection: Connection) -> Send:
    """Return a `send` for HTTP/1.0, which has no chunks: a response without a length ends with the connection."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            if any(name.lower() == b"content-length" for name, _ in message["headers"]):
                if cycle.keep_alive:  # HTTP/1.0 keeps a connection only if both sides say so
                    message["headers"] = [*message["headers"], (b"connection", b"keep-alive")]
            else:
                cycle.keep_alive = cycle.chunked_encoding = connection.chunked = False
        elif not connection.chunked:
            connection.write(message.get("body", b""))
            message["body"] = b""  # uvicorn would check it against the announced length
        await cycle.send(message)  # type: ignore[arg-type]

    return send


class SlowClients:
    """Drops clients that read nothing of what was written for them (also of a finished response, whose connection would
    stay open), and clients that read a stream too slowly to ever catch up."""

    def __init__(self, clients: Collection[_Protocol], timeout_s: float) -> None:
        self._clients = clients
        self._timeout_s = timeout_s
        self._stuck: dict[_Protocol, tuple[int, float]] = {}  # unsent bytes, and since when they are unchanged

    async def sweep_forever(self) -> None:
        """Check all clients four times per timeout. One task for all: a timer per write would cost more than it."""
        while True:
            await asyncio.sleep(self._timeout_s / 4)
            self._sweep(asyncio.get_running_loop().time())

    def _sweep(self, now: float) -> None:
        stuck, self._stuck = self._stuck, {}
        for client in list(self._clients):
            size = client.transport.get_write_buffer_size()
            before, since = stuck.get(client, (size, now))
            if size != before:
                since = now
            name, connection = client.answering()
            blocked = connection.blocked_since if connection is not None and connection.streams else None
            waits_s = now - min(since if size else now, now if blocked is None else blocked)
            if waits_s > self._timeout_s:
                text = "%s: dropped: its client has read nothing for %.1f s (--slow-client-timeout)"
                _log.warning(text, name, waits_s)
                client.transport.abort()
            elif size:
                self._stuck[client] = (size, since)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the supervisor handles them


class HttpServer:
    """HTTP server for an ASGI app. `app` may be replaced at any time, for open connections too. `slow_client_timeout`
    is also the timeout for a request's headers and for written output to be read."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, limits: Limits, *, probe_after_s: float = PROBE_AFTER_S
    ) -> None:
        self.app = app
        timeout_s = limits.slow_client_timeout
        self._config = uvicorn.Config(
            self._call,
            interface="asgi3",
            loop="uvloop",
            http=type(
                "Protocol",
                (_Protocol,),
                {"head_timeout_s": timeout_s, "probe_after_s": probe_after_s, "limiter": ConnectionLimiter()},
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=limits.keep_alive_timeout,
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
            proxy_headers=False,
        )
        self.server = _Server(self._config)
        connections: set[Any] = self.server.server_state.connections
        self.connections = connections
        self._slow_clients = SlowClients(self.connections, timeout_s)
        self._sweeper: asyncio.Task[None] | None = None
        self._listener = listener
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (cycle := scope.pop(_HTTP_1_0, None)) is not None:  # popped, since the cycle refers to the scope
            send = _without_chunks(cycle, scope[CONNECTION])
        await self.app(scope, receive, send)

    async def start(self) -> None:
        """Start serving; returns when connections are accepted. Raises the server's error if it cannot start."""
        self._task = asyncio.create_task(self._serve_forever())
        while not self.server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it started")
            await asyncio.sleep(0.005)  # uvicorn offers no event for this
        self._sweeper = asyncio.create_task(self._slow_clients.sweep_forever())

    async def _serve_forever(self) -> None:
        """Serve until `stop`, restarting a server that ended. Meanwhile connections wait in the listener's backlog."""
        wait_s, has_served = RESTART_S, False
        while True:
            # a loop turn accepts one connection per listener, and a fresh server gets many at once
            listeners = [self._listener.dup() for _ in range(NUM_LISTENERS)]
            why = "it ended"
            try:
                await self.server.serve(sockets=listeners)
            except Exception as error:
                if not has_served and not self.server.started:
                    raise
                why = f"{type(error).__name__}: {error}"
            finally:
                for one in (*getattr(self.server, "servers", ()), *listeners):
                    one.close()
            if self._stopping.is_set():
                return
            has_served = has_served or self.server.started
            _log.error("the Python HTTP server ended: %s: restarting it in %.1f s", why, wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return
            wait_s = min(2 * wait_s, MAX_RESTART_S)
            state = self.server.server_state  # open connections are kept
            self.server = _Server(self._config)
            self.server.server_state = state

    async def stop(self, *, at_once: bool = False) -> None:
        """Accept no more connections; wait for running responses for `GRACE_S`, or abort them `at_once`. Idempotent."""
        self._stopping.set()
        self._listener.close()
        self.server.should_exit = True
        self.server.force_exit = at_once
        if self._task is not None:
            await self._task
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._task = self._sweeper = None
