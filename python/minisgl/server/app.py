"""The HTTP application: what is built over an engine client and a tokenizer, and which endpoint answers what."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import Response
from fastapi.routing import APIRoute

from minisgl.config import ServerConfig
from minisgl.frontend.adapters import Adapter
from minisgl.frontend.engine_client import ProcessClient
from minisgl.metrics.server_metrics import Metrics
from minisgl.metrics.steps import ChromeTrace
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
from minisgl.server.batches.background import Background
from minisgl.server.batches.endpoint import Batches, add_batches, add_files, asks, no_batches, room_of
from minisgl.server.batches.store import Store
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
from minisgl.server.classify import ClassifyRequest, classify_endpoint
from minisgl.server.completions import completion_endpoint
from minisgl.server.context import Served, ServerContext
from minisgl.server.encoding import detokenize_endpoint, embeddings_endpoint, tokenize_endpoint
from minisgl.server.errors import MESSAGES, RESPONSES, install_handlers
from minisgl.server.formatter import Formatter, json_response
from minisgl.server.gateway_forms import form_of
from minisgl.server.health import add_health
from minisgl.server.live import add_live
from minisgl.server.llama_cpp import endpoint as llama_cpp
from minisgl.server.log import say
from minisgl.server.messages.body import CountTokensRequest, MessagesRequest
from minisgl.server.messages.endpoint import COUNT_TOKENS, count_tokens_endpoint, messages_endpoint
from minisgl.server.middleware import Endpoint, Middleware, Posts
from minisgl.server.ollama import endpoint as ollama
from minisgl.server.ollama import models as ollama_models
from minisgl.server.openapi import POLICY, docs_page, install_openapi
from minisgl.server.prompts import Prompts
from minisgl.server.receipts import OF_GATEWAY, Receipts
from minisgl.server.rerank import RerankRequest, ScoreRequest, rerank_endpoint, score_endpoint
from minisgl.server.responses.body import ResponsesRequest
from minisgl.server.responses.endpoint import (
    INPUT_TOKENS,
    add_responses,
    input_tokens_endpoint,
    responses_endpoint,
)
from minisgl.server.sglang import abort_endpoint, add_sglang, generate_endpoint
from minisgl.server.tools import Parsing
from minisgl.server.waiting import Queue
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import Gateway

_log = logging.getLogger("minisgl.server")
PlainEndpoint = Callable[[ServerContext, Any], Awaitable[Formatter | Response | Later]]
GENERATING: dict[str, tuple[type[Any], PlainEndpoint]] = {
    "/v1/chat/completions": (ChatRequest, chat_endpoint),
    "/v1/completions": (CompletionRequest, completion_endpoint),
    "/v1/embeddings": (EmbeddingRequest, embeddings_endpoint),
    "/v1/rerank": (RerankRequest, rerank_endpoint),
    "/v2/rerank": (RerankRequest, rerank_endpoint),
    "/v1/score": (ScoreRequest, score_endpoint),
    "/v1/classify": (ClassifyRequest, classify_endpoint),
    "/generate": (GenerateRequest, generate_endpoint),
}
TOLD: dict[str, tuple[type[Any], Endpoint]] = {
    RESPONSES: (ResponsesRequest, responses_endpoint),
    INPUT_TOKENS: (ResponsesRequest, input_tokens_endpoint),
    MESSAGES: (MessagesRequest, messages_endpoint),
    COUNT_TOKENS: (CountTokensRequest, count_tokens_endpoint),
    "/abort_request": (AbortGenerate, abort_endpoint),
    LOAD: (LoadAdapterRequest, load_adapter_endpoint),
    UNLOAD: (UnloadAdapterRequest, unload_adapter_endpoint),
    PREFIXES: (PrefixRequest, insert_prefix_endpoint),
    **ollama.POSTS,
    **ollama_models.POSTS,
}
"""Those that are told of the request itself."""
OTHER: dict[str, tuple[type[Any], PlainEndpoint]] = {
    "/tokenize": (TokenizeRequest, tokenize_endpoint),
    "/detokenize": (DetokenizeRequest, detokenize_endpoint),
}


def _for_any(endpoint: PlainEndpoint) -> Endpoint:
    return lambda context, body, request: endpoint(context, body)


_PLAIN: dict[str, tuple[type[Any], PlainEndpoint]] = {**GENERATING, **OTHER, **llama_cpp.POSTS}
POSTS = {path: (model, _for_any(endpoint)) for path, (model, endpoint) in _PLAIN.items()} | TOLD


@dataclass(frozen=True, slots=True)
class Application:
    """What an HTTP server runs, and what its supervisor must reach."""

    context: ServerContext
    middleware: Middleware  # an ASGI application
    batches: Batches | None  # to be started, and stopped
    answer: Callable[[str], str | None]  # for the gateway: of forms (`gateway_forms`) and of receipts


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
        batches=lambda: None if batches is None else batches.runner.lines(),
    )
    client.dispatch, client.processor.queue = metrics.dispatch, metrics.queue
    client.codec = metrics.codec(measured=config.engine.debug.transport_stats)
    queue = Queue(client.processor, config.limits, keys, gateway)
    parsing = Parsing(tokenizer, config.tool_call_parser, config.reasoning_parser)
    prompts = Prompts(client, tokenizer, parsing, queue, metrics.tokenize)
    context = ServerContext(client, config, Served(config, client.adapters, defaults or {}), prompts, queue, metrics)
    receipts = Receipts(context)
    posts = Posts(context, POSTS, app, receipts)
    batches = None
    if config.state_dir is not None:
        batches = Batches(config, Store.open(config.state_dir), room_of(context), asks(posts, config))
    found = no_batches if batches is None else batches.here
    add_files(app, found)
    add_batches(app, found)
    add_cache(app, context)
    add_responses(app, context)
    for path in POSTS:
        if path != PREFIXES:
            app.post(path)(_for_the_page)
    _add_models(app, context, config.engine.shown_model)
    add_health(app, context)
    add_live(app, context)
    add_sglang(app, context, config.engine.shown_model)
    llama_cpp.add_llama_cpp(app, context, config.engine.shown_model)
    ollama_models.add_ollama(app, context)
    _answer_head(app)
    install_openapi(app)
    _add_docs(app)
    inner = Background(posts, room_of(context)) if config.takes_lines else posts
    return Application(context, Middleware(inner, config), batches, _answering(form_of(parsing), receipts.of_gateway))


def _answering(form: Callable[[str], str | None], receipt: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """What the gateway calls with its questions, of forms and of receipts."""
    return lambda question: (receipt if question.startswith(OF_GATEWAY) else form)(question)


async def _for_the_page() -> None:
    """Stands for a POST endpoint on the OpenAPI page, and answers other methods with 405; `Posts` answers its own."""


def _card(context: ServerContext, root: str, adapter: Adapter | None = None) -> dict[str, object]:
    """`root`: what was loaded, whatever it is called."""
    return {
        "id": context.served.name if adapter is None else adapter.name,
        "object": "model",
        "created": context.served.created,
        "owned_by": "minisgl",
        "root": root if adapter is None else os.path.basename(os.path.abspath(adapter.path)),
        **({} if adapter is None else {"parent": context.served.name}),
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
        name = context.served.check(model_id)
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
