"""The HTTP application: routes over an engine client and a tokenizer.

Keeps true: a handler reads its body under the limit, answers in OpenAI's shapes, frees the engine when its client goes.
Doesn't know: processes, sockets, how the engine is started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.config import ServerConfig
from minisgl.frontend.engine_client import ProcessClient
from minisgl.metrics.chrome_trace import ChromeTrace
from minisgl.metrics.server_metrics import Metrics
from minisgl.server.chat import answer_chat
from minisgl.server.completions import answer_completion
from minisgl.server.context import ServerContext
from minisgl.server.docs_page import POLICY, docs_page
from minisgl.server.errors import ApiError, install_handlers, internal_error
from minisgl.server.gate import RECORD, Gate
from minisgl.server.generate import answer_generate
from minisgl.server.intake import ClientGone, Payload
from minisgl.server.limits import too_late
from minisgl.server.log import say
from minisgl.server.openapi import install_openapi
from minisgl.server.operations import add_operations
from minisgl.server.record import MAX_LOGGED_CHARS, RequestRecord
from minisgl.server.slow_clients import SlowClients
from minisgl.server.tokenize import answer_detokenize, answer_tokenize
from minisgl.server.transport import NoResponse, json_response
from minisgl.tokenizer import Tokenizer

_log = logging.getLogger("minisgl.server")
Answer = Callable[[ServerContext, Request, Payload, RequestRecord], Coroutine[Any, Any, Response]]
Handler = Callable[[Request], Awaitable[Response]]
GENERATING: dict[str, Answer] = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
    "/generate": answer_generate,
}
OTHER: dict[str, Answer] = {"/tokenize": answer_tokenize, "/detokenize": answer_detokenize}


@dataclass(frozen=True, slots=True)
class Application:
    """What an HTTP server runs, and what its supervisor must reach."""

    context: ServerContext
    gate: Gate  # an ASGI application


def build_app(
    client: ProcessClient, tokenizer: Tokenizer, config: ServerConfig, defaults: Mapping[str, Any] | None = None
) -> Application:
    """`client` must be ready. `defaults`: fields of `SamplingParams` for requests that leave them out."""
    app = FastAPI(title="minisgl", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_handlers(app)
    slow_clients = SlowClients(config.limits.slow_client_timeout)
    metrics = Metrics(
        lambda: client.stats,
        lambda: client.info,
        lambda: client.failure is None,
        waiting=lambda: client.processor.num_waiting,
        aliases_for=config.model_name if config.metrics_aliases == "vllm" else None,
        trace=ChromeTrace(steps, "http", say) if (steps := config.engine.debug.profile_steps) else None,
    )
    client.dispatch, client.processor.detokenize = metrics.dispatch, metrics.detokenize
    client.processor.queue = metrics.queue
    client.codec = metrics.codec(measured=config.engine.debug.transport_stats)
    context = ServerContext(
        client,
        tokenizer,
        metrics,
        config.model_name,
        int(time.time()),
        config.limits,
        log_prompts=config.log_prompts,
        any_model_name=config.any_model_name,
        defaults=defaults,
    )
    handlers = {path: _handler(context, answer) for path, answer in (GENERATING | OTHER).items()}
    for path, handler in handlers.items():
        app.post(path)(handler)  # for the OpenAPI page and other methods
    _add_models(app, context, config.engine.model)
    add_operations(app, context)
    _answer_head(app)
    install_openapi(app)
    _add_docs(app)
    return Application(context, Gate(_Direct(handlers, app), config, slow_clients))


class _Direct:
    """POST endpoints without the layers of the framework, which cost more than ours; the rest goes through them."""

    def __init__(self, handlers: Mapping[str, Handler], app: ASGIApp) -> None:
        self._handlers = handlers
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except Exception as error:
            _log.exception("%s: a bug", scope[RECORD].request_id)
            await internal_error(error).response()(scope, receive, send)


def _handler(context: ServerContext, answer: Answer) -> Handler:
    async def handle(request: Request) -> Response:
        record: RequestRecord = request.scope[RECORD]
        limits = context.limits
        body = Payload(context.turns)
        try:
            context.check_accepts()
            async with asyncio.timeout(limits.request_timeout):
                await context.read_body(request, body)
                if context.log_prompts:
                    record.prompt, record.output = body.begin(MAX_LOGGED_CHARS), ""
                return await answer(context, request, body, record)
        except ClientGone:
            return NoResponse()
        except TimeoutError as error:  # a stream has its own clock from here on
            record.error = "request_timeout"
            raise too_late(limits.request_timeout or 0.0) from error
        except ApiError as error:
            record.error = error.body["error"]["code"]
            raise
        finally:
            body.done()

    handle.__name__ = answer.__name__
    return handle


def _add_models(app: FastAPI, context: ServerContext, root: str) -> None:
    """`root`: what was loaded, whatever it is called."""

    def card() -> dict[str, object]:
        return {
            "id": context.model_name,
            "object": "model",
            "created": context.created,
            "owned_by": "minisgl",
            "root": root,
            "max_model_len": context.info.max_seq_len,
            **({"simulated": context.info.simulated} if context.info.simulated else {}),
        }

    @app.api_route("/v1", methods=["GET", "POST", "OPTIONS"])
    async def api() -> Response:
        return json_response({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        context.check_model(model_id)
        return json_response(card())


def _add_docs(app: FastAPI) -> None:
    text = docs_page(app.openapi())

    async def docs(_: Request) -> Response:
        return Response(text, media_type="text/html", headers={"content-security-policy": POLICY})

    app.add_route("/docs", docs)  # no part of the OpenAPI page, as /openapi.json


def _answer_head(app: FastAPI) -> None:
    """On every GET route; the HTTP server leaves the body out."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")
