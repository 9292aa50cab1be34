"""The HTTP application: routes over an engine client and a tokenizer, and the way of a POST.

Invariants: a handler reads its body under the limit, answers in OpenAI's shapes, frees the engine when its client goes;
a stream's status waits for its first tokens: an early failure is a proper status.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.config import ServerConfig
from minisgl.frontend.adapters import Adapter
from minisgl.frontend.engine_client import ProcessClient
from minisgl.frontend.output_processor import Delta
from minisgl.metrics.server_metrics import Metrics
from minisgl.metrics.steps import ChromeTrace
from minisgl.parsers import ids
from minisgl.server.admin import (
    LOAD,
    PREFIXES,
    UNLOAD,
    Later,
    add_cache,
    insert_prefix_endpoint,
    load_adapter_endpoint,
    unload_adapter_endpoint,
)
from minisgl.server.api_keys import KeyUse
from minisgl.server.bodies import (
    AbortGenerate,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    LoadAdapterRequest,
    PrefixRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from minisgl.server.chat import chat_endpoint
from minisgl.server.completions import completion_endpoint
from minisgl.server.connection import CONNECTION, Connection
from minisgl.server.context import ServerContext
from minisgl.server.encoding import detokenize_endpoint, embeddings_endpoint, tokenize_endpoint
from minisgl.server.errors import MESSAGES, ApiError, install_handlers, internal_error, too_late
from minisgl.server.formatter import Formatter, json_response
from minisgl.server.generation import Generation
from minisgl.server.health import add_health
from minisgl.server.live import add_live
from minisgl.server.log import say
from minisgl.server.messages.body import CountTokensRequest, MessagesRequest
from minisgl.server.messages.endpoint import COUNT_TOKENS, count_tokens_endpoint, messages_endpoint
from minisgl.server.middleware import Middleware
from minisgl.server.openapi import POLICY, docs_page, install_openapi
from minisgl.server.request import REQUEST, ClientGone, HttpRequest
from minisgl.server.responses.body import ResponsesRequest
from minisgl.server.responses.endpoint import (
    INPUT_TOKENS,
    RESPONSES,
    add_responses,
    input_tokens_endpoint,
    responses_endpoint,
)
from minisgl.server.resume import Resumable, lost
from minisgl.server.sglang import abort_endpoint, add_sglang, generate_endpoint
from minisgl.server.tools import Parsing
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import Gateway

_log = logging.getLogger("minisgl.server")
Show = Callable[[Generation, list[Delta]], bytes]
Answering = Awaitable[Formatter | Response | Later]
Endpoint = Callable[[ServerContext, Any], Answering]
ToldEndpoint = Callable[[ServerContext, Any, HttpRequest], Answering]
GENERATING: dict[str, tuple[type[Any], Endpoint]] = {
    "/v1/chat/completions": (ChatRequest, chat_endpoint),
    "/v1/completions": (CompletionRequest, completion_endpoint),
    "/v1/embeddings": (EmbeddingRequest, embeddings_endpoint),
    "/generate": (GenerateRequest, generate_endpoint),
}
TOLD: dict[str, tuple[type[Any], ToldEndpoint]] = {
    RESPONSES: (ResponsesRequest, responses_endpoint),
    INPUT_TOKENS: (ResponsesRequest, input_tokens_endpoint),
    MESSAGES: (MessagesRequest, messages_endpoint),
    COUNT_TOKENS: (CountTokensRequest, count_tokens_endpoint),
    "/abort_request": (AbortGenerate, abort_endpoint),
    LOAD: (LoadAdapterRequest, load_adapter_endpoint),
    UNLOAD: (UnloadAdapterRequest, unload_adapter_endpoint),
}
"""Those that are told of the request itself."""
OTHER: dict[str, tuple[type[Any], Endpoint]] = {
    "/tokenize": (TokenizeRequest, tokenize_endpoint),
    "/detokenize": (DetokenizeRequest, detokenize_endpoint),
    PREFIXES: (PrefixRequest, insert_prefix_endpoint),
}


def _for_any(endpoint: Endpoint) -> ToldEndpoint:
    return lambda context, body, request: endpoint(context, body)


POSTS = {path: (model, _for_any(endpoint)) for path, (model, endpoint) in (GENERATING | OTHER).items()} | TOLD


@dataclass(frozen=True, slots=True)
class Application:
    """What an HTTP server runs, and what its supervisor must reach."""

    context: ServerContext
    middleware: Middleware  # an ASGI application


def build_app(
    client: ProcessClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    defaults: Mapping[str, Any] | None = None,
    gateway: Gateway | None = None,
    pool: Callable[[], Mapping[str, Any]] | None = None,
) -> Application:
    """`client` must be ready. `defaults`: fields of `SamplingParams` for requests that leave them out. `gateway`: what
    answers at the port before this. `pool`: what stands before several engines says so of itself."""
    app = FastAPI(title="minisgl", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_handlers(app)
    keys = KeyUse(
        config.api_keys,
        lambda number: client.processor.num_waiting_of.get(number, 0),
        (lambda number: None) if gateway is None else gateway.key,
    )
    metrics = Metrics(
        lambda: client.stats,
        lambda: client.info,
        lambda: client.failure is None,
        waiting=lambda: client.processor.num_waiting,
        gateway=None if gateway is None else gateway.readings,
        aliases_for=config.model_name if config.metrics_aliases == "vllm" else None,
        engines=lambda: client.engines,
        pool=pool,
        trace=ChromeTrace(steps, "http", say) if (steps := config.engine.debug.profile_steps) else None,
        keys=keys.counts,
    )
    client.dispatch, client.processor.queue = metrics.dispatch, metrics.queue
    client.codec = metrics.codec(measured=config.engine.debug.transport_stats)
    context = ServerContext(
        client,
        tokenizer,
        metrics,
        config.model_name,
        int(time.time()),
        config.limits,
        log_prompts=config.log_prompts,
        aliases=config.model_aliases,
        any_model_name=config.any_model_name,
        lora_folder=config.lora_folder,
        max_loras=config.max_loras,
        defaults=defaults,
        gateway=gateway,
        keys=keys,
        parsing=Parsing(tokenizer, config.tool_call_parser, config.reasoning_parser),
    )
    add_cache(app, context)
    add_responses(app, context)
    for path in POSTS:
        if path != PREFIXES:
            app.post(path)(_for_the_page)
    _add_models(app, context, config.engine.shown_model)
    add_health(app, context)
    add_live(app, context)
    add_sglang(app, context, config.engine.shown_model)
    _answer_head(app)
    install_openapi(app)
    _add_docs(app)
    return Application(context, Middleware(_Posts(context, app), config))


async def _for_the_page() -> None:
    """Stands for a POST endpoint on the OpenAPI page, and answers other methods with 405; `_Posts` answers its own."""


class _Posts:
    """POST endpoints without the layers of the framework, which cost more than ours; the rest goes through them."""

    def __init__(self, context: ServerContext, app: ASGIApp) -> None:
        self._context = context
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = POSTS.get(scope["path"]) if scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        request: HttpRequest = scope[REQUEST]
        end: bytes | None = None  # of a stream; sent when the engine is free of it: a client may be slow
        try:
            answer = await self._prepare(request, receive, *found)
            if isinstance(answer, Formatter):
                with Generation(
                    self._context,
                    request,
                    answer.prompts,
                    answer.sampling,
                    answer.priority,
                    names_length=answer.names_length,
                    shown=answer.shown,
                    only_prompt=answer.only_prompt,
                    rid=answer.rid,
                ) as generation:
                    if answer.stream:
                        end = await _stream(generation, answer, request, scope[CONNECTION], send)
                    else:
                        more = answer.headers
                        whole = partial(answer.whole, generation, await generation.collect())
                        answer = await self._context.of_body(lambda: json_response(whole()), generation.is_large)
                        answer.raw_headers += generation.headers() + more
            elif isinstance(answer, Later):
                answer = await answer.answer()
        except ClientGone:
            return
        except ApiError as error:
            request.error = error.code
            answer = error.response(scope["path"])
        except Exception as error:
            _log.exception("%s: a bug", request.request_id)
            answer = internal_error(type(error).__name__).response(scope["path"])
        if end is not None:
            await send({"type": "http.response.body", "body": end, "more_body": False})
        elif isinstance(answer, Response):
            await answer(scope, receive, send)

    async def _prepare(
        self, request: HttpRequest, receive: Receive, model: type[Any], endpoint: ToldEndpoint
    ) -> Formatter | Response | Later:
        """Everything before the engine. The time of what comes then is taken by `Generation`."""
        context = self._context
        limits = context.limits
        try:
            context.check_accepts(request.key)
            async with asyncio.timeout(limits.request_timeout):
                body = await request.read(receive, model, context)
                request.model = context.check_model(body.model)
                with ids.of(None if request.resumable is None else request.resumable.source):
                    return await endpoint(context, body, request)
        except TimeoutError as error:
            raise too_late(limits.request_timeout or 0.0) from error
        finally:
            request.body_done()


def _marked(formatter: Formatter, resumable: Resumable) -> Show:
    """Chunks with marks behind them, by which another server could go on."""

    def chunk(generation: Generation, deltas: list[Delta]) -> bytes:
        with ids.of(resumable.source):
            shown = formatter.chunk(generation, deltas)
            return shown + resumable.mark(deltas, generation.token_ids, generation.reason, generation.cached)

    return chunk


async def _stream(
    generation: Generation, formatter: Formatter, request: HttpRequest, connection: Connection, send: Send
) -> bytes:
    """Chunks as tokens come, straight into the connection; returns what comes after them. Raises `ApiError` before the
    first one."""
    resumable, first = request.resumable, list[Delta]()
    show: Show = formatter.chunk if resumable is None else _marked(formatter, resumable)
    if resumable is not None and resumable.said is not None:
        generation.replay(resumable.said.turns, show)
    else:
        first = await generation.first()
    headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), (b"content-type", formatter.media_type)]
    headers += generation.headers(begins=True) + formatter.headers
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        with connection.stream(generation.pause, generation.resume):
            if generation.is_large and formatter.sampling.prompt_logprobs is not None:
                await generation.stream_from_lane(first, show, connection.write)
            else:
                await generation.stream(first, show, connection.write)
        return formatter.end(generation)
    except ApiError as error:
        request.error = error.code
        is_gone = resumable is not None and error.status == 503
        return lost(str(error)) if is_gone else formatter.error(error)
    except Exception as error:
        _log.exception("%s: a bug", request.request_id)
        return formatter.error(internal_error(type(error).__name__))


def _card(context: ServerContext, root: str, adapter: Adapter | None = None) -> dict[str, object]:
    """`root`: what was loaded, whatever it is called."""
    return {
        "id": context.model_name if adapter is None else adapter.name,
        "object": "model",
        "created": context.created,
        "owned_by": "minisgl",
        "root": root if adapter is None else os.path.basename(os.path.abspath(adapter.path)),
        **({} if adapter is None else {"parent": context.model_name}),
        "max_model_len": context.info.max_seq_len,
        **({"simulated": context.info.simulated} if context.info.simulated else {}),
    }


def model_list(context: ServerContext, root: str) -> Response:
    """The answer to GET /v1/models."""
    adapters = [_card(context, root, adapter) for adapter in context.client.adapters.ready()]
    return json_response({"object": "list", "data": [_card(context, root), *adapters]})


def _add_models(app: FastAPI, context: ServerContext, root: str) -> None:
    @app.api_route("/v1", methods=["GET", "POST", "OPTIONS"])
    async def api() -> Response:
        return json_response({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return model_list(context, root)

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        name = context.check_model(model_id)
        return json_response(_card(context, root, context.client.adapters.by_name.get(name)))


def _add_docs(app: FastAPI) -> None:
    text = docs_page(app.openapi())

    async def docs(_: object) -> Response:
        return Response(text, media_type="text/html", headers={"content-security-policy": POLICY})

    app.add_route("/docs", docs)  # no part of the OpenAPI page, as /openapi.json


def _answer_head(app: FastAPI) -> None:
    """On every GET route; the HTTP server leaves the body out."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")
