"""The HTTP application: routes over an engine client and a tokenizer.

Keeps true: a handler reads its body under the limit, answers in OpenAI's shapes, frees the engine when its client goes.
Doesn't know: processes, sockets, how the engine is started.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minisgl.message import EngineReady
from minisgl.metrics import Metrics
from minisgl.server.chat import answer_chat
from minisgl.server.completions import answer_completion
from minisgl.server.context import ServerContext
from minisgl.server.engine_client import EngineClient
from minisgl.server.errors import SERVER, ApiError, install_handlers
from minisgl.server.generate import answer_generate
from minisgl.server.openapi import install_openapi
from minisgl.server.tokenize import answer_detokenize, answer_tokenize, version
from minisgl.server.transport import ClientGone, NoResponse, json_response, read_body
from minisgl.tokenizer import Tokenizer

Answer = Callable[[ServerContext, Request, bytes, float], Awaitable[Response]]


def build_app(client: EngineClient, tokenizer: Tokenizer, model_name: str) -> FastAPI:
    """`client` must be ready."""
    app = FastAPI(title="minisgl", docs_url="/docs", redoc_url=None, redirect_slashes=False)
    install_handlers(app)
    metrics = Metrics(lambda: client.stats, lambda: client.info, lambda: client.failure is None)
    context = ServerContext(client, tokenizer, metrics, model_name, int(time.time()))
    for path, answer in (
        ("/v1/chat/completions", answer_chat),
        ("/v1/completions", answer_completion),
        ("/generate", answer_generate),
        ("/tokenize", answer_tokenize),
        ("/detokenize", answer_detokenize),
    ):
        app.post(path)(_handler(context, answer))
    _add_models(app, context)
    _add_operations(app, context)
    install_openapi(app)
    return app


def _handler(context: ServerContext, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        arrival_time = time.monotonic()
        try:
            return await answer(context, request, await read_body(request), arrival_time)
        except ClientGone:
            return NoResponse()

    handle.__name__ = answer.__name__
    return handle


def _add_models(app: FastAPI, context: ServerContext) -> None:
    def card() -> dict[str, object]:
        return {
            "id": context.model_name,
            "object": "model",
            "created": context.created,
            "owned_by": "minisgl",
            "max_model_len": context.info.max_seq_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        context.check_model(model_id)
        return json_response(card())


def _add_operations(app: FastAPI, context: ServerContext) -> None:
    client = context.client

    def check_ready() -> EngineReady:
        if client.failure is not None or client.info is None:
            raise ApiError(503, client.failure or "the engine is loading", kind=SERVER, code="not_ready")
        return client.info

    @app.get("/version")
    async def get_version() -> Response:
        return json_response(version())

    @app.get("/livez")
    async def livez() -> Response:
        """This process answers, whatever its engine does."""
        return json_response({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        check_ready()
        return json_response({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        info, stats = check_ready(), client.stats
        return json_response(
            {
                "status": "ok",
                "model": context.model_name,
                "engine": info.engine,
                "cpu_backend": info.cpu_backend,
                "device": info.device,
                "dtype": info.dtype,
                "max_seq_len": info.max_seq_len,
                "page_size": info.page_size,
                "num_pages": info.num_pages,
                "requests_open": client.num_live,
                "stats": None if stats is None else {name: getattr(stats, name) for name in stats.__struct_fields__},
            }
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
