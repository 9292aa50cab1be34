"""Assembles the HTTP application from an engine client and a tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from minisgl.config import ServerConfig
from minisgl.frontend.engine_client import ProcessClient
from minisgl.images import pillow_trouble
from minisgl.metrics.server_metrics import Metrics
from minisgl.metrics.steps import ChromeTrace
from minisgl.server.admin.live import add_live
from minisgl.server.admin.prefixes import PREFIXES, add_cache
from minisgl.server.apis.anthropic.models import shown_model, shown_models
from minisgl.server.apis.responses.endpoint import add_responses
from minisgl.server.batches.background import Background
from minisgl.server.batches.endpoint import Batches, add_batches, add_files, line_capacity, line_submitter, no_batches
from minisgl.server.batches.store import Store
from minisgl.server.core.api_keys import KeyUse
from minisgl.server.core.context import Served, ServerContext
from minisgl.server.core.errors import MODELS, install_handlers
from minisgl.server.core.formatter import json_response
from minisgl.server.core.log import say
from minisgl.server.core.middleware import Middleware, Posts
from minisgl.server.core.prompts import Prompts
from minisgl.server.core.receipts import Receipts
from minisgl.server.core.tools import Parsing
from minisgl.server.core.waiting import Queue
from minisgl.server.openapi import POLICY, docs_page, install_openapi
from minisgl.server.prepare import Preparing
from minisgl.server.routes import POSTS, ROUTES, Handler, card, models
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import Gateway


@dataclass(frozen=True, slots=True)
class Application:
    """The HTTP application and its parts that the supervisor must start and stop."""

    context: ServerContext
    middleware: Middleware  # the outermost ASGI app
    batches: Batches | None  # to start and stop
    preparing: Preparing | None  # if there is a gateway; to start and stop


def build_app(
    client: ProcessClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    defaults: Mapping[str, Any] | None = None,
    gateway: Gateway | None = None,
    pool: Callable[[], Mapping[str, Any]] | None = None,
) -> Application:
    """Assemble the application. `client` must be ready. `defaults`: `SamplingParams` fields that requests leave out.
    `gateway`: the front end at the port, if any. `pool`: returns the router's metrics, if there are several engines."""
    if client.info is not None and client.info.sees and (trouble := pillow_trouble()):
        client.be_blind(trouble)
    app = FastAPI(title="minisgl", docs_url=None, redoc_url=None, redirect_slashes=False)
    keys = KeyUse(
        config.api_keys,
        client.processor.waiting_for,
        (lambda number: None) if gateway is None else gateway.key,
        has_default=config.api_key is not None,
    )
    metrics = _metrics(client, config, keys, gateway, pool)
    queue = Queue(client.processor, config.limits, keys, gateway)
    parsing = Parsing(tokenizer, config.tool_call_parser, config.reasoning_parser)
    prompts = Prompts(client, tokenizer, parsing, queue, metrics.tokenize, config.images)
    context = ServerContext(client, config, Served(config, client.adapters, defaults or {}), prompts, queue, metrics)
    posts = Posts(context, POSTS, app, Receipts(context))
    batches = None
    if config.state_dir is not None:
        batches = Batches(config, Store.open(config.state_dir), line_capacity(context), line_submitter(posts, config))
        metrics.batches = batches.runner.lines
    _add_routes(app, context, batches)
    inner = Background(posts, line_capacity(context)) if config.takes_lines else posts
    middleware = Middleware(inner, config)
    preparing = None if gateway is None else Preparing(gateway, middleware, posts)
    return Application(context, middleware, batches, preparing)


def _metrics(
    client: ProcessClient,
    config: ServerConfig,
    keys: KeyUse,
    gateway: Gateway | None,
    pool: Callable[[], Mapping[str, Any]] | None,
) -> Metrics:
    """Create the server's metrics, and connect the engine client to those that it measures."""
    metrics = Metrics(
        lambda: client.stats,
        lambda: client.info,
        lambda: client.failure is None,
        waiting=lambda: client.processor.num_waiting,
        gateway=None if gateway is None else gateway.readings,
        beat=(lambda: None) if gateway is None else gateway.beat,
        frontend="python" if gateway is None else "rust",
        routing=config.routing_in_use,
        aliases_for=config.model_name if config.metrics_aliases == "vllm" else None,
        engines=lambda: client.engines,
        pool=pool,
        trace=ChromeTrace(steps, "http", say) if (steps := config.engine.debug.profile_steps) else None,
        keys=keys.counts,
    )
    client.dispatch, client.processor.queue = metrics.dispatch, metrics.queue
    client.codec = metrics.codec(measured=config.engine.debug.transport_stats)
    return metrics


def _add_routes(app: FastAPI, context: ServerContext, batches: Batches | None) -> None:
    install_handlers(app)
    get_batches = no_batches if batches is None else batches.here
    add_files(app, get_batches)
    add_batches(app, get_batches)
    add_cache(app, context)
    add_responses(app, context)
    for path in POSTS:
        if path != PREFIXES:
            app.post(path)(_for_the_page)
    _add_handlers(app, context)
    add_live(app, context)
    _answer_head(app)
    install_openapi(app)
    _add_docs(app)


async def _for_the_page() -> None:
    """Placeholder for a POST endpoint on the OpenAPI page; other methods get 405. `Posts` handles the POST itself."""


def _answers(context: ServerContext, handler: Handler) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        shown = handler(context)
        return shown if isinstance(shown, Response) else json_response(shown)

    return answer


def _add_handlers(app: FastAPI, context: ServerContext) -> None:
    for route in ROUTES:
        if route.handler is not None:
            methods = [route.method.upper(), *route.also]
            app.api_route(route.path, methods=methods)(_answers(context, route.handler))

    @app.get(MODELS)
    async def all_models(request: Request) -> Response:
        return json_response(shown_models(models(context), request.scope))

    @app.get(f"{MODELS}/{{model_id:path}}")
    async def model(request: Request, model_id: str) -> Response:
        name = context.served.check(model_id)
        return json_response(shown_model(card(context, context.client.adapters.by_name.get(name)), request.scope))


def _add_docs(app: FastAPI) -> None:
    text = docs_page(app.openapi())

    async def docs(_: object) -> Response:
        return Response(text, media_type="text/html", headers={"content-security-policy": POLICY})

    app.add_route("/docs", docs)  # not on the OpenAPI page, like /openapi.json


def _answer_head(app: FastAPI) -> None:
    """Allow HEAD on every GET route; the HTTP server drops the body."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")
