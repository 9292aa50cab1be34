"""Middleware of every request (id, headers, API key, access log) and dispatch of POST requests: the body is read, the
endpoint decides what is to be generated, and the output is sent whole or as a stream.

Invariants: every response has the request's id, and every request one access line, also after a disconnect (probes and
files of the page: only if configured); for an unauthorized caller nothing is done, and no body is read; without a key
only /livez, /readyz and the files of the page are served. A disconnect frees the engine; the status of a stream is
delayed until its first tokens or for a moment: an early failure gets a proper status; then the stream sends signs of
life (`config.Silence`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.config import ServerConfig, Silence
from minisgl.frontend.output_processor import Delta
from minisgl.parsers import ids
from minisgl.server.core import api_keys
from minisgl.server.core.callers import HARMLESS, SEVERAL, Callers, Headers, Pairs, no_upgrade
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import (
    FORM,
    MESSAGES,
    MODELS,
    ApiError,
    bad_value,
    internal_error,
    is_anthropic,
    renamed,
    too_late,
)
from minisgl.server.core.formatter import IGNORED, Deferred, Formatter, json_response
from minisgl.server.core.generation import Generation
from minisgl.server.core.http import CONNECTION, Connection
from minisgl.server.core.page import PREFIX, WebPage
from minisgl.server.core.receipts import FIELD, Receipts
from minisgl.server.core.request import REQUEST, ClientGone, HttpRequest
from minisgl.server.core.resume import NOTHING_NEW, Resumable, lost
from minisgl.server.core.running import Running
from minisgl.server.core.unserved import shown

OPEN_PATHS = ("/livez", "/readyz")
PROBES = (*OPEN_PATHS, "/health", "/metrics")
WITHOUT_V1 = frozenset(
    {"/chat/completions", "/completions", "/models", "/embeddings", "/rerank", "/score", "/classify"}
)  # as some base URLs are written
_log = logging.getLogger("minisgl.server")
Show = Callable[[Generation, list[Delta]], bytes]
Endpoint = Callable[[ServerContext, Any, HttpRequest], Awaitable[Formatter | Response | Deferred]]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """Result of checking a request's headers. `path`: normalized, of its route; `form`: path whose API decides the
    shape of errors; `more`: headers for every response that lacks them; `early`: the response, if the headers suffice
    for one (such as a refusal)."""

    request: HttpRequest
    path: str
    form: str
    more: Pairs
    early: Response | None


class Middleware:
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = api_keys.ApiKeys(config)
        self._callers = Callers.of(config)
        self._page = WebPage()
        self._unlogged = () if config.access_log_probes else PROBES
        self._is_resumable = config.resumable
        self._num_open = 0
        self.idle = asyncio.Event()  # set while no POST is being answered
        self.idle.set()

    @property
    def num_open(self) -> int:
        return self._num_open

    def admit(self, method: str, version: str, target: str, pairs: Pairs) -> CheckedRequest:
        """Check a request by its headers alone. `target`: the path; `version`: of HTTP, such as "1.1"."""
        headers = dict(pairs)
        if len(headers) < len(pairs) and sum(name == b"host" for name, _ in pairs) > 1:
            headers[b"host"] = SEVERAL
        request = HttpRequest.of(method, target, headers)
        path = target.rstrip("/") or "/"  # trailing slashes are ignored
        path = f"/v1{path}" if path in WITHOUT_V1 else path
        more = [(b"x-request-id", request.request_id.encode()), *HARMLESS, *self._callers.cors_headers(headers)]
        form = MESSAGES if b"anthropic-version" in headers and f"{path}/".startswith(f"{MODELS}/") else path
        if is_anthropic(form):
            more.append((b"request-id", request.request_id.encode()))
        early = self._early_answer(method, version, path, form, headers, request)
        return CheckedRequest(request, path, form, more, early)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        admitted = self.admit(scope["method"], scope["http_version"], scope["path"], scope["headers"])
        request, more, early = admitted.request, admitted.more, admitted.early
        scope["path"] = admitted.path
        scope[FORM] = admitted.form, request.request_id
        scope[REQUEST] = request

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(one for one in more if one[0] not in given)]
            await send(message)

        counts = scope["method"] == "POST"
        if counts:
            self._enter()
        try:
            if early is not None:
                await early(scope, receive, answer)
            elif counts:
                await unless_gone(self._app, scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        finally:
            if counts:
                self._leave()
            if not self._is_unlogged(scope["path"], request) and not request.is_passed_on:
                request.log()

    def _is_unlogged(self, path: str, request: HttpRequest) -> bool:
        """Return true if a request has no access line: a probe, or a successful one for a file of the page."""
        return path in self._unlogged or (bool(self._unlogged) and path.startswith(PREFIX) and request.status < 400)

    def _enter(self) -> None:
        self._num_open += 1
        self.idle.clear()

    def _leave(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self.idle.set()

    def _early_answer(
        self, method: str, version: str, path: str, form: str, headers: Headers, request: HttpRequest
    ) -> Response | None:
        """Return a response that needs headers alone (refusal, CORS preflight, page file); `None`: the app answers."""
        error = self._callers.refusal(method, version, headers, path)
        if error is None and (answer := self._callers.preflight(method, headers)) is not None:
            return answer  # browsers send a preflight without the key
        if error is None and (page := self._page.answer(method, path, headers)) is not None:
            return page  # the page asks its user for the key
        if error is None and not self._has_key(path, headers, request):
            error = ApiError(401, "Authorization: the API key is missing or wrong", code="invalid_api_key")
            error.headers["www-authenticate"] = "Bearer"
        if error is None and method == "GET":
            error = no_upgrade(headers)
        if error is None and self._is_resumable:
            try:
                request.resumable = Resumable.of(headers)
            except ApiError as refusal:
                error = refusal
        if error is None:
            return None
        request.error = error.code
        return error.response(form, request.request_id)

    def _has_key(self, path: str, headers: Headers, request: HttpRequest) -> bool:
        """Check the API key in `Authorization: Bearer` or `x-api-key` and store its index in `request`. Return true if
        it is valid or none is needed."""
        if not self._keys.are_required or path in OPEN_PATHS:
            return True
        if (given := headers.get(b"authorization")) is not None:
            scheme, _, key = given.partition(b" ")
        else:
            scheme, key = b"bearer", headers.get(b"x-api-key", b"")
        number = self._keys.number(key.strip()) if scheme.lower() == b"bearer" else None
        if number is None:
            return False
        request.key, request.key_name = number, self._keys.name(number)
        return True


async def unless_gone(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the app; cancel it when the client disconnects, at whatever point."""
    connection: Connection = scope[CONNECTION]
    task = asyncio.current_task()
    connection.cancel_when_lost(task)
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        if not connection.is_lost or task is None:
            raise
        task.uncancel()
    finally:
        connection.cancel_when_lost(None)


class Posts:
    """Dispatches POST requests to endpoints, without the framework's costly layers; `app` handles all others."""

    def __init__(
        self,
        context: ServerContext,
        endpoints: Mapping[str, tuple[type[Any], Endpoint]],
        app: ASGIApp,
        receipts: Receipts,
    ) -> None:
        self.context = self._context = context
        self._endpoints = endpoints  # (body type, endpoint) by path
        self._app = app
        self._receipts = receipts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in self._endpoints:
            await self._app(scope, receive, send)
            return
        request: HttpRequest = scope[REQUEST]
        end: bytes | None = None  # last bytes of a stream; sent after the engine is free, since a client may be slow
        try:
            answer = await self.prepare(request, receive, scope["path"])
            if isinstance(answer, Formatter):
                with Running(self._context, request, answer.wanted) as running:
                    if answer.stream:
                        silence = self._context.config.silence
                        end = await _stream(running, answer, request, scope[CONNECTION], send, silence)
                    else:
                        more = answer.headers
                        whole = partial(answer.whole, running.generation, await running.collect())
                        answer = await self._context.prompts.run_work(lambda: json_response(whole()), running.is_large)
                        answer.raw_headers += running.generation.headers() + more
            elif isinstance(answer, Deferred):
                answer = await answer.answer()
        except ClientGone:
            return
        except ApiError as error:
            request.error = error.code
            answer = error.answer(scope)
        except Exception as error:
            _log.exception("%s: a bug", request.request_id)
            answer = internal_error(type(error).__name__).answer(scope)
        if end is not None:
            await send({"type": "http.response.body", "body": end, "more_body": False})
        elif isinstance(answer, Response):
            await answer(scope, receive, send)

    async def prepare(
        self,
        request: HttpRequest,
        receive: Receive | None,
        path: str,
        is_wanted: Callable[[Any], bool] = lambda body: True,
    ) -> Formatter | Response | Deferred | None:
        """Do everything before generation: check admission, read the body, run the endpoint. `receive`: as for
        `HttpRequest.read`. Returns `None` for a valid body that is not `is_wanted`. Raises `ApiError`, `ClientGone`."""
        context = self._context
        model, endpoint = self._endpoints[path]
        limits = context.limits
        try:
            context.check_accepts(request.key)
            async with asyncio.timeout(limits.request_timeout):
                body = await request.read(receive, model, context)
                if not is_wanted(body):
                    return None
                request.model = context.served.check(body.model)
                source = None if request.resumable is None else request.resumable.source
                with ids.of(source), renamed(request.written):
                    answer = await endpoint(context, body, request)
                    if isinstance(answer, Formatter):
                        answer.wanted.ignored += tuple(request.ignored)
                    elif isinstance(answer, Response) and request.ignored:
                        answer.raw_headers.append((IGNORED, shown(request.ignored).encode()))
                    if isinstance(answer, Formatter) and getattr(body, FIELD, None):
                        wanted = answer.wanted
                        if wanted.only_prompt:
                            raise bad_value(FIELD, True, "needs at least one generated token")
                        wanted.sampling, wanted.receipts = await self._receipts.begin(wanted.sampling, request.model)
                    return answer
        except TimeoutError as error:
            raise too_late(limits.request_timeout or 0.0) from error
        finally:
            request.body_done()


def _marked(formatter: Formatter, resumable: Resumable) -> tuple[Show, Callable[[], bytes]]:
    """Return functions for chunks and pings with resume marks, by which another server could continue the stream."""

    def chunk(generation: Generation, deltas: list[Delta]) -> bytes:
        with ids.of(resumable.source):
            shown = formatter.chunk(generation, deltas)
            return shown + resumable.mark(deltas, generation.token_ids, generation.reason, generation.cached)

    return chunk, lambda: formatter.ping() + NOTHING_NEW


async def _stream(
    running: Running,
    formatter: Formatter,
    request: HttpRequest,
    connection: Connection,
    send: Send,
    silence: Silence,
) -> bytes:
    """Write a stream's chunks as tokens arrive; return its last bytes. Raises `ApiError` before any chunk only."""
    resumable, first, opening = request.resumable, list[Delta](), b""
    show, ping = (formatter.chunk, formatter.ping) if resumable is None else _marked(formatter, resumable)
    if resumable is not None and resumable.said is not None:
        running.replay(resumable.said.turns, show)
    else:
        first = await running.first(silence.head_wait)
        opening = b"" if first else ping()
    headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), (b"content-type", formatter.media_type)]
    headers += running.generation.headers(begins=True) + formatter.headers
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        with connection.stream(running.pause, running.resume), connection.kept_alive(ping, silence.longest):
            connection.write(opening)
            if running.is_large and formatter.wanted.sampling.prompt_logprobs is not None:
                await running.stream_from_lane(first, show, connection.write)
            else:
                await running.stream(first, show, connection.write)
        return formatter.end(running.generation)
    except ApiError as error:
        request.error = error.code
        is_gone = resumable is not None and error.status == 503
        return lost(str(error)) if is_gone else formatter.error(error)
    except Exception as error:
        _log.exception("%s: a bug", request.request_id)
        return formatter.error(internal_error(type(error).__name__))
