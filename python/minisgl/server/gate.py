"""Around the application: request ids, who may ask, the API key, the access log, who is still being answered.

Keeps true: every request gets its id back and one access line, also when its client goes (probes: only if asked for);
nothing is done, and no body read, for a caller that may not ask; without the key nothing but /livez and /readyz
answers.
Doesn't know: routes, bodies.
"""

from __future__ import annotations

import asyncio
import hmac

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.config import ServerConfig
from minisgl.server.callers import Callers, Headers
from minisgl.server.connection import CONNECTION, Connection
from minisgl.server.errors import ApiError
from minisgl.server.record import RequestRecord, request_id
from minisgl.server.slow_clients import SlowClients

RECORD = "minisgl.record"  # keys of the ASGI scope
SLOW_CLIENTS = "minisgl.slow_clients"
OPEN_PATHS = ("/livez", "/readyz")
PROBES = (*OPEN_PATHS, "/health", "/metrics")


class Gate:
    def __init__(self, app: ASGIApp, config: ServerConfig, slow_clients: SlowClients) -> None:
        self._app = app
        self._api_key = None if config.api_key is None else config.api_key.encode()
        self._callers = Callers.of(config)
        self._unlogged = () if config.access_log_probes else PROBES
        self._slow_clients = slow_clients
        self._num_open = 0
        self.idle = asyncio.Event()  # no POST is being answered
        self.idle.set()

    @property
    def num_open(self) -> int:
        return self._num_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        record = RequestRecord(scope["method"], scope["path"], request_id(given))
        scope["path"] = scope["path"].rstrip("/") or "/"  # with slashes at the end a route is the same one
        scope[RECORD] = record
        scope[SLOW_CLIENTS] = self._slow_clients
        more = [(b"x-request-id", record.request_id.encode()), *self._callers.cors_headers(headers)]

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        counts = scope["method"] == "POST"
        if counts:
            self._enter()
        try:
            if (early := self._early_answer(scope, headers, record)) is not None:
                await early(scope, receive, answer)
            elif counts:
                await self._unless_gone(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        finally:
            if counts:
                self._leave()
            if scope["path"] not in self._unlogged:
                record.log()

    async def _unless_gone(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; stop when the client goes away, wherever that is."""
        connection: Connection = scope[CONNECTION]
        task = asyncio.current_task()
        connection.cancels(task)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not connection.is_lost or task is None:
                raise
            task.uncancel()
        finally:
            connection.cancels(None)

    def _enter(self) -> None:
        self._num_open += 1
        self.idle.clear()

    def _leave(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.idle.set()

    def _early_answer(self, scope: Scope, headers: Headers, record: RequestRecord) -> Response | None:
        """To those who may not ask, and to browsers that ask whether a page may. None: the application answers."""
        error = self._callers.refusal(scope["method"], scope["http_version"], headers)
        if error is None and (answer := self._callers.preflight(scope["method"], headers)) is not None:
            return answer  # a browser asks this without the key
        if error is None and not self._has_key(scope["path"], headers.get(b"authorization", b"")):
            error = ApiError(401, "Authorization: the API key is missing or wrong", code="invalid_api_key")
            error.headers["www-authenticate"] = "Bearer"
        if error is None:
            return None
        record.error = error.body["error"]["code"]
        return error.response()

    def _has_key(self, path: str, authorization: bytes) -> bool:
        if self._api_key is None or path in OPEN_PATHS:
            return True
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)
