"""Assembles the HTTP application from an engine client and a tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

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
from minisgl.server.core.routes import Routes
from minisgl.server.core.tools import Parsing
from minisgl.server.core.waiting import Queue
from minisgl.server.openapi import add_pages
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
    app = Routes()
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


def _add_routes(app: Routes, context: ServerContext, batches: Batches | None) -> None:
    install_handlers(app)
    get_batches = no_batches if batches is None else batches.here
    add_files(app, get_batches)
    add_batches(app, get_batches)
    add_cache(app, context)
    add_responses(app, context)
    for path in POSTS:
        if path != PREFIXES:
            app.on(path, "POST")(_handled_before)
    _add_handlers(app, context)
    add_live(app, context)
    add_pages(app)


async def _handled_before(request: Request) -> Response:
    """Stand for a POST endpoint, so that other methods get 405. `Posts` handles the POST itself."""
    raise AssertionError(request.url.path)


def _answers(context: ServerContext, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        shown = handler(context)
        return shown if isinstance(shown, Response) else json_response(shown)

    return answer


def _add_handlers(app: Routes, context: ServerContext) -> None:
    for route in ROUTES:
        if route.handler is not None:
            app.on(route.path, route.method.upper(), *route.also)(_answers(context, route.handler))

    @app.on(MODELS, "GET")
    async def all_models(request: Request) -> Response:
        return json_response(shown_models(models(context), request.scope))

    @app.on(f"{MODELS}/{{model_id:path}}", "GET")
    async def model(request: Request, model_id: str) -> Response:
        name = context.served.check(model_id)
        return json_response(shown_model(card(context, context.client.adapters.by_name.get(name)), request.scope))
