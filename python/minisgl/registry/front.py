"""The server at the port of several models: finds the model of a request, has it loaded, and forwards the request to
its server; it answers the few routes about all models itself.

A request names its model in its body, in the query (`?model=`) or in the header `X-Minisgl-Model`. A request without a
name is for the first loaded model, else for the first one.
Invariants: API keys are checked before anything is loaded (`server/core/middleware.py`); while a model loads, a stream
gets comments, and a later error is an event; a request whose server dies before it has answered anything is sent once
more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.config import ServerConfig
from minisgl.registry import adapters
from minisgl.registry.about import Asks, card, health, metrics, stats, tags
from minisgl.registry.batches import BatchesOfSeveral
from minisgl.registry.keys import KeyLimits, KeyRequest
from minisgl.registry.model import Lease, Model
from minisgl.registry.registry import Registry
from minisgl.registry.server import ModelServer
from minisgl.server.admin.live import STREAM
from minisgl.server.apis.anthropic.models import shown_model, shown_models
from minisgl.server.apis.ollama.endpoint import as_message, as_response, ping
from minisgl.server.apis.ollama.models import version
from minisgl.server.batches.endpoint import not_kept
from minisgl.server.batches.store import Store
from minisgl.server.core.errors import (
    BATCHES,
    FILES,
    MODELS,
    RESPONSES,
    ApiError,
    draining,
    engine_gone,
    is_anthropic,
    is_ollama,
    last_event,
    loading,
    model_not_loaded,
    queue_full,
)
from minisgl.server.core.formatter import json_response
from minisgl.server.core.glance import NOTHING, WRONG, begin_of, decoded, text_of
from minisgl.server.core.http import CONNECTION, Connection
from minisgl.server.core.middleware import unless_gone
from minisgl.server.core.passing import WHO, Answer, Headers, Lost, ask, request_bytes
from minisgl.server.core.request import REQUEST, ClientGone, HttpRequest
from minisgl.server.core.streams import EVENT_PING, EVENTS, LINE_PING, LINES, STREAMED
from minisgl.server.core.waiting import Turns, has_room
from minisgl.utils.installed import own_version

MODEL_HEADER = b"x-minisgl-model"
HELD = 16
"""Capacity for bytes of forwarded requests, as a multiple of --max-encoding-bytes."""
COMMENT_AFTER_S = 5.0
"""Seconds after which a stream that waits for its model gets comments; earlier errors are an HTTP status."""
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class _Body(msgspec.Struct):
    model: msgspec.Raw = NOTHING
    stream: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    lora_name: msgspec.Raw = NOTHING
    lora_path: msgspec.Raw = NOTHING


T = TypeVar("T")
Own = Callable[[], Awaitable[Response]]


class Front:
    """The ASGI application of the port, to be wrapped in `Middleware`."""

    def __init__(self, registry: Registry, config: ServerConfig, store: Store | None = None) -> None:
        """Create the application. `store` has files and batches; None: there are none."""
        self._registry = registry
        self._config = config
        self._turns = Turns(config.limits.max_encoding_bytes, lambda _: None)
        num_owners = len(config.api_keys) + (config.api_key is not None)
        self._held = _ByteLimiter(HELD * config.limits.max_encoding_bytes, num_owners)
        limits = self._limits = KeyLimits(config.api_keys, registry)
        self.batches = None if store is None else BatchesOfSeveral(registry, limits, config, store)
        self.draining = False
        asks = self._asks = Asks(registry, config.any_key)
        self._own: dict[str, Own] = {
            "/livez": lambda: _now({"status": "ok"}),
            "/readyz": self._ready,
            "/health": lambda: _now(health(registry, self.draining)),
            "/version": lambda: _now({"version": own_version()}),
            "/v1": lambda: _now({"status": "ok"}),
            "/api/tags": lambda: _now(tags(registry)),
            "/api/ps": lambda: _now(tags(registry, are_loaded=True)),
            "/api/version": lambda: _now(version()),
            "/stats": lambda: stats(asks),
            "/metrics": lambda: metrics(
                asks, limits, None if self.batches is None else self.batches.all.runner.lines()
            ),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: HttpRequest = scope[REQUEST]
        try:
            answer = await self._answer(scope, receive, send, request)
        except ClientGone:
            return
        except ApiError as error:
            request.error = error.code
            answer = error.answer(scope)
        finally:
            request.body_done()
        if answer is not None:
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request: HttpRequest) -> Response | None:
        path, method = scope["path"], scope["method"]
        if method in ("GET", "HEAD"):
            if (own := self._own.get(path)) is not None:
                return await own()
            if path == MODELS:
                return json_response(shown_models(chain(*map(card, self._registry.models.values())), scope))
            if path.startswith(f"{MODELS}/"):
                name = path.removeprefix(f"{MODELS}/")
                first, *others = card(self._registry.named(name))
                return json_response(shown_model(next((one for one in others if one["id"] == name), first), scope))
        if path.startswith((FILES, BATCHES)):
            if self.batches is None:
                raise not_kept(path)
            await self.batches.app(scope, receive, send)
            return None
        if self.draining:
            raise draining()
        if method == "POST" and path.startswith(f"{MODELS}/") and path.endswith(("/load", "/unload")):
            return await self._load_or_unload(path, request)
        await request.receive(receive, self._turns, self._config.limits)
        body, model = self._asked(scope, request)
        if path.startswith(f"{RESPONSES}/"):
            model = await self._that_keeps(scope, model)
        if path in adapters.PATHS:
            model = adapters.owner(self._registry, path, text_of(body.lora_name), model)
        passed = _ForwardedRequest(self._registry, model, scope, request, send, self._held, _kind_of(path, body))
        request.body_done()  # the next body may be read: the answer may take long
        if method == "POST":
            with contextlib.ExitStack() as stack:
                asked = stack.enter_context(self._limits.ask(request.key, path, model))
                if path in adapters.PATHS:
                    names = (text_of(body.lora_name), text_of(body.lora_path))
                    stack.enter_context(adapters.changing(self._registry, path, names, model, passed.is_ok))
                await passed.answer(asked)
        else:
            await unless_gone(lambda *_: passed.answer(), scope, receive, send)
        return None

    def _asked(self, scope: Scope, request: HttpRequest) -> tuple[_Body, Model]:
        """Parse the fields of a body that matter here, and find the request's model. Raises `ApiError` 404."""
        try:
            body = decoded(request.body, _Body)
        except WRONG:
            body = _Body()  # a server reports the error
        query = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[0]
        header = unquote(dict(scope["headers"]).get(MODEL_HEADER, b"").decode("latin-1"))
        name = text_of(body.model) or query or header
        model = self._registry.named(name) if name else self._registry.first
        return body, model

    async def _that_keeps(self, scope: Scope, otherwise: Model) -> Model:
        """Return the loaded model whose server has the stored response that the path names, or `otherwise`."""
        path = b"/".join(scope["path"].encode().split(b"/")[:4])
        headers = [one for one in scope["headers"] if one[0] in WHO]
        answers = await self._asks.all(path, headers)
        return self._registry.models[next(iter(answers))] if answers else otherwise

    async def _ready(self) -> Response:
        if self.draining:
            raise draining()
        if not self._registry.is_ready:
            raise loading("the models to load at the start (preload, pin) are loading")
        return json_response({"status": "ok"})

    async def _load_or_unload(self, path: str, request: HttpRequest) -> Response:
        name, _, what = path.removeprefix(f"{MODELS}/").rpartition("/")
        self._limits.use.check_may(request.key, "models", path)
        model = self._registry.named(unquote(name))
        if what == "unload":
            await self._registry.unload(model)
        else:
            with self._registry.lease(model) as lease:
                await until_ready(lease, self._registry)
        return json_response(card(model)[0])


def _kind_of(path: str, body: _Body) -> str | None:
    """Return the content type of the stream that a request asks for, or None if it asks for no stream."""
    said = begin_of(body.stream, 6)
    if path not in STREAMED or said == b"false" or (said != b"true" and not is_ollama(path)):
        return None
    return STREAMED[path][0 if body.prompt != NOTHING else -1]


async def _now(content: object) -> Response:
    return json_response(content)


async def until_ready(lease: Lease, registry: Registry) -> None:
    """Wait until the lease's model is loaded. Raises `ApiError` 503 if it is not in time."""
    try:
        async with asyncio.timeout(registry.load_timeout_s):
            await asyncio.shield(lease.ready)
    except TimeoutError as error:
        model, ahead = lease.model, registry.place(lease.model)
        doing = f"it is loading: {model.seen.doing}" if model.state == "loading" else f"{ahead} models wait before it"
        reason = f"{model.name}: not loaded within {registry.load_timeout_s:g} s (--load-timeout): {doing}"
        raise model_not_loaded(reason) from error


class _ByteLimiter:
    """The bytes of forwarded requests, `most` at once. They are held until a response begins, because the request is
    sent again if its server dies before."""

    def __init__(self, most: int, num_owners: int) -> None:
        self._most = most
        self._num_owners = num_owners
        self._by_key = Counter[int]()

    def acquire(self, key: int, size: int) -> None:
        """Reserve `size` bytes for the API key with index `key`. Raises `ApiError` 429 without `has_room`."""
        own, count = self._by_key[key], self._by_key.total()
        if not has_room(self._most, self._num_owners, own, count, size):
            raise queue_full(f"{own} bytes of this API key's requests wait for their answers, {count} of all keys")
        self._by_key[key] += size

    def release(self, key: int, size: int) -> None:
        self._by_key[key] -= size


class _ForwardedRequest:
    """A client's request on its way to its model's server."""

    def __init__(
        self,
        registry: Registry,
        model: Model,
        scope: Scope,
        request: HttpRequest,
        send: Send,
        held: _ByteLimiter,
        kind: str | None,
    ) -> None:
        """Prepare the request. `kind`: the content type of the stream that it asks for; None: no stream."""
        self._held = held
        self._registry = registry
        self._model = model
        self._path: str = scope["path"]
        self._connection: Connection = scope[CONNECTION]
        self._request = request
        self._send = send
        self._kind = kind
        self._asked: KeyRequest | None = None
        self._status = 0
        self._has_begun = self._answer_has_begun = False  # the former also by a comment
        headers = [one for one in scope["headers"] if one[0] != b"x-request-id"]
        query = b"&".join(one for one in scope["query_string"].split(b"&") if not one.startswith(b"model="))
        path = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0] + (b"?" + query if query else b"")
        headers.append((b"x-request-id", request.request_id.encode()))
        self._bytes = request_bytes(scope["method"], path, headers, request.body)

    async def answer(self, asked: KeyRequest | None = None) -> None:
        """Send the request and pass the response on. `asked` makes it wait for its API key's turn."""
        self._asked = asked
        self._held.acquire(self._request.key, len(self._bytes))
        try:
            try:
                await self._once()
            except Lost:
                if self._answer_has_begun:
                    raise
                await self._once()
        except Lost as error:
            await self._end_with(engine_gone(f"model: {self._model.name}: its server {error}"))
        except ApiError as error:
            await self._end_with(error)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._held.release(self._request.key, len(self._bytes))
        self._bytes = b""

    def _begins(self) -> None:
        """Mark that the server's response has begun: from now on the request is not sent again."""
        self._answer_has_begun = True
        self._let_go()

    def is_ok(self) -> bool:
        """Return True if the server answered with status 200."""
        return self._status == 200

    async def _once(self) -> None:
        """Send the request to its model's server once the model is loaded. Raises `Lost` or `ApiError`."""
        with self._registry.lease(self._model) as lease:
            await self._waited(until_ready(lease, self._registry), self._loading)
            if self._asked is not None:
                await self._waited(self._asked.turn(), lambda: "as many requests of its key run as may")
            if self._path != STREAM:
                await self._ask(lease.ready.result())
        if self._path == STREAM:  # a watcher holds no lease
            await self._ask(lease.ready.result())

    async def _ask(self, server: ModelServer) -> None:
        try:
            asked = ask(server.address, self._bytes)
            answer = await (self._waited(asked, lambda: "ping") if self._has_begun else asked)
        except Lost:
            await asyncio.wait({asyncio.shield(server.ended)}, timeout=1.0)  # so that the next lease is of a new server
            raise
        with contextlib.closing(answer):
            await self._pass(answer)

    async def _waited(self, work: Coroutine[Any, Any, T], doing: Callable[[], str]) -> T:
        """Await `work` and return its result. Meanwhile a stream gets comments, which say what it waits for."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=None if self._kind is None else COMMENT_AFTER_S))[0]:
                if not self._has_begun:
                    charset = "; charset=utf-8" if self._kind == EVENTS else ""
                    await self._begin(200, [(b"content-type", f"{self._kind}{charset}".encode()), *_HEADERS])
                self._connection.write(self._ping(doing()))
            return await task
        finally:
            task.cancel()

    def _ping(self, doing: str) -> bytes:
        if is_ollama(self._path):
            return ping(self._model.name, as_message if self._path == "/api/chat" else as_response)
        if self._kind == LINES:
            return LINE_PING
        return b": %b\n%b" % (doing.encode(), EVENT_PING if is_anthropic(self._path) else b"\n")

    def _loading(self) -> str:
        model, ahead = self._model, self._registry.place(self._model)
        doing = model.seen.doing if model.state == "loading" else f"{ahead} models before it"
        return f"{model.name} is {model.state}: {doing}".replace("\n", " ")

    async def _begin(self, status: int, headers: Headers) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _pass(self, answer: Answer) -> None:
        self._request.is_passed_on, self._status = True, answer.status
        if self._asked is not None:
            self._asked.begins()
        if not answer.is_chunked or (self._has_begun and answer.status != 200):
            body = await answer.whole()
            self._begins()
            if not self._has_begun:
                await self._begin(answer.status, answer.headers)
                await self._send({"type": "http.response.body", "body": body})
                return
            self._connection.write(last_event(self._path, msgspec.json.decode(body), self._kind or EVENTS))
        else:
            self._begins()
            if not self._has_begun:
                await self._begin(answer.status, answer.headers)
            await answer.into(self._connection)
        await self._send({"type": "http.response.body", "body": b""})

    async def _end_with(self, error: ApiError) -> None:
        """End with an error: raise it if the status can still be sent, else write it as the stream's last event."""
        self._request.error, self._request.is_passed_on = error.code, False
        if not self._has_begun:
            raise error
        if self._kind is None:
            self._connection.drop()  # without a body's end, so that the client sees an error
            return
        self._connection.write(last_event(self._path, error.body_for(self._path), self._kind))
        await self._send({"type": "http.response.body", "body": b""})
