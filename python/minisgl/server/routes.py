"""Table of all routes: request body, handler, response model, and description for the OpenAPI page.

Invariants: a POST's body type is that of its endpoint's parameter. Routes without a handler here are those of `admin/`,
`batches/` and `apis/responses/`, whose responses depend on more than a body.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel

from minisgl.frontend.adapters import Adapter
from minisgl.server.admin import adapters, health, prefixes
from minisgl.server.admin import body as admin
from minisgl.server.apis.anthropic import body as messages
from minisgl.server.apis.anthropic.endpoint import count_tokens_endpoint, messages_endpoint
from minisgl.server.apis.llama_cpp import body as llama_cpp
from minisgl.server.apis.llama_cpp import endpoint as llama
from minisgl.server.apis.ollama import body as ollama
from minisgl.server.apis.ollama import endpoint as ollama_endpoint
from minisgl.server.apis.ollama import models as ollama_models
from minisgl.server.apis.openai import answers as openai
from minisgl.server.apis.openai import chat, classify, completions, rerank, tokens
from minisgl.server.apis.responses import body as responses
from minisgl.server.apis.responses.endpoint import input_tokens_endpoint, responses_endpoint
from minisgl.server.apis.sglang import body as sglang_body
from minisgl.server.apis.sglang import endpoint as sglang
from minisgl.server.batches import body as batches
from minisgl.server.core.context import ServerContext
from minisgl.server.core.embeddings import embeddings_endpoint
from minisgl.server.core.middleware import Endpoint

Handler = Callable[[ServerContext], Any]


@dataclass(frozen=True, slots=True)
class Route:
    """Route and handler: `endpoint` for a POST with a body, else `handler`, which returns the response or its JSON."""

    path: str
    method: str
    summary: str
    answer: type[BaseModel] | None  # None: plain text
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = (401, 403, 503)
    body_type: str = "application/json"
    endpoint: Endpoint | None = None
    handler: Handler | None = None
    also: tuple[str, ...] = ()


_GENERATE = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_TEXT = tuple(status for status in _GENERATE if status != 500)
_RESPONSE = "/v1/responses/{response_id}"
_KEPT = (400, 401, 403, 404)
_REFUSED = (401, 403, 415, 501)
_KEEP = (*_GENERATE[:5], 409, *_GENERATE[5:])
_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
_STATE = (401, 403, 404, 500, 501, 503)
_STATES = (400, 401, 403, 500, 501, 503)
_NEW_BATCH = (400, 401, 403, 408, 409, 413, 415, 429, 500, 501, 503)


def _post(
    path: str, summary: str, answer: type[BaseModel] | None, endpoint: Endpoint, errors: tuple[int, ...] = _GENERATE
) -> Route:
    _, body, *_ = get_type_hints(endpoint).values()
    return Route(path, "post", summary, answer, body, errors, endpoint=endpoint)


def _get(path: str, summary: str, answer: type[BaseModel] | None, handler: Handler, **more: Any) -> Route:
    return Route(path, "get", summary, answer, handler=handler, **more)


def card(context: ServerContext, adapter: Adapter | None = None) -> dict[str, object]:
    root = context.config.engine.shown_model if adapter is None else os.path.basename(os.path.abspath(adapter.path))
    return {
        "id": context.served.name if adapter is None else adapter.name,
        "object": "model",
        "created": context.served.created,
        "owned_by": "minisgl",
        "root": root,
        **({} if adapter is None else {"parent": context.served.name}),
        "max_model_len": context.info.max_seq_len,
        **({"vision": True} if context.info.sees else {}),
        **({"simulated": context.info.simulated} if context.info.simulated else {}),
    }


def models(context: ServerContext) -> list[dict[str, object]]:
    """Return the cards of /v1/models: the model and its adapters."""
    return [card(context), *(card(context, one) for one in context.client.adapters.ready())]


ROUTES: tuple[Route, ...] = (
    _post("/v1/chat/completions", "Answer a conversation.", openai.ChatAnswer, chat.chat_endpoint),
    _post("/v1/completions", "Continue texts or token ids.", openai.CompletionAnswer, completions.completion_endpoint),
    _post("/v1/responses", "Answer a conversation (OpenAI's newer API).", responses.ResponseAnswer, responses_endpoint),
    _post(
        "/v1/responses/input_tokens", "Count an input's tokens.", responses.InputTokens, input_tokens_endpoint, _TEXT
    ),
    Route(_RESPONSE, "get", "Get a stored answer.", responses.ResponseAnswer, errors=_KEPT),
    Route(_RESPONSE, "delete", "Delete a stored answer.", responses.ResponseDeleted, errors=_KEPT[1:]),
    Route(
        f"{_RESPONSE}/cancel",
        "post",
        "Always refused: there is no background mode.",
        responses.ResponseAnswer,
        errors=(400, 401, 403, 404, 415),
    ),
    Route(f"{_RESPONSE}/input_items", "get", "Get the input of a stored answer.", responses.ItemList, errors=_KEPT),
    _post("/v1/messages", "Answer a conversation (Anthropic's API).", messages.MessageAnswer, messages_endpoint),
    _post(
        "/v1/messages/count_tokens", "Count a conversation's tokens.", messages.TokenCount, count_tokens_endpoint, _TEXT
    ),
    _post("/v1/embeddings", "Get vectors of texts.", openai.EmbeddingAnswer, embeddings_endpoint),
    *(
        _post(path, "Rank texts by a query.", rerank.RerankAnswer, rerank.rerank_endpoint)
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    _post("/v1/score", "Score pairs of texts.", rerank.ScoreAnswer, rerank.score_endpoint),
    _post("/v1/classify", "Label texts.", classify.ClassifyAnswer, classify.classify_endpoint),
    Route(
        "/v1/files",
        "post",
        "Upload a file of requests for a batch.",
        batches.FileAnswer,
        batches.FileUpload,
        _NEW_BATCH,
        "multipart/form-data",
    ),
    Route("/v1/files", "get", "List the caller's files.", batches.FileList, errors=_STATES),
    Route(_FILE, "get", "One file.", batches.FileAnswer, errors=_STATE),
    Route(f"{_FILE}/content", "get", "A file's content.", None, errors=_STATE),
    Route(_FILE, "delete", "Delete a file.", batches.FileDeleted, errors=(*_STATE[:3], 409, *_STATE[3:])),
    Route(
        "/v1/batches",
        "post",
        "Answer the requests of a file in the background.",
        batches.BatchAnswer,
        batches.BatchRequest,
        _NEW_BATCH,
    ),
    Route("/v1/batches", "get", "List the caller's batches.", batches.BatchList, errors=_STATES),
    Route(_BATCH, "get", "One batch, with how far it is.", batches.BatchAnswer, errors=_STATE),
    Route(
        f"{_BATCH}/cancel",
        "post",
        "Cancel a batch; what is answered is kept.",
        batches.BatchAnswer,
        errors=(*_STATE[:3], 409, 415, *_STATE[3:]),
    ),
    _post("/generate", "Continue one prompt.", sglang_body.GenerateAnswers, sglang.generate_endpoint),
    _post(
        "/tokenize",
        "Get the token ids of a text or a conversation.",
        openai.TokenizeAnswer,
        tokens.tokenize_endpoint,
        _TEXT,
    ),
    _post("/detokenize", "Get the text of token ids.", openai.DetokenizeAnswer, tokens.detokenize_endpoint, _TEXT),
    _post("/completion", "Continue texts, in llama.cpp's form.", llama_cpp.LlamaCppAnswers, llama.completion_endpoint),
    _post(
        "/infill",
        "Fill the gap between two texts, in llama.cpp's form.",
        llama_cpp.LlamaCppAnswer,
        llama.infill_endpoint,
    ),
    _post(
        "/apply-template",
        "Get the text that the chat template makes of a conversation.",
        llama_cpp.RenderedTemplate,
        llama.template_endpoint,
        _TEXT,
    ),
    _get("/props", "What is served, in llama.cpp's form.", llama_cpp.Props, llama.props),
    _get("/slots", "How many requests run, in llama.cpp's form.", llama_cpp.Slots, llama.slots),
    _post("/api/chat", "Answer a conversation (Ollama's API).", ollama.OllamaChatAnswer, ollama_endpoint.chat_endpoint),
    _post(
        "/api/generate",
        "Answer or continue a prompt (Ollama's API).",
        ollama.OllamaGenerateAnswer,
        ollama_endpoint.generate_endpoint,
    ),
    _post(
        "/api/embed", "Get vectors of texts (Ollama's API).", ollama.OllamaEmbedAnswer, ollama_endpoint.embed_endpoint
    ),
    _post(
        "/api/embeddings",
        "Get the vector of a text (Ollama's older API).",
        ollama.OllamaEmbeddingsAnswer,
        ollama_endpoint.embedding_endpoint,
    ),
    _post("/api/show", "The model (Ollama's API).", ollama.OllamaShown, ollama_models.show_endpoint, _TEXT),
    _get("/api/tags", "The model and its adapters (Ollama's API).", ollama.OllamaModels, ollama_models.tags),
    _get("/api/ps", "The same, with when they are unloaded: never.", ollama.OllamaModels, ollama_models.loaded),
    _get(
        "/api/version",
        "The version of Ollama's API.",
        ollama.OllamaVersion,
        lambda _: ollama_models.version(),
        errors=(401, 403),
    ),
    *(
        Route(
            path,
            method.lower(),
            "Always refused: there is one model.",
            ollama.OllamaError,
            errors=_REFUSED,
            handler=partial(ollama_models.refuse, path),
        )
        for path, (method, _) in ollama_models.REFUSED.items()
    ),
    _post("/abort_request", "End requests to /generate.", None, sglang.abort_endpoint, _TEXT),
    _post(adapters.LOAD, "Load an adapter.", None, adapters.load_adapter_endpoint, _KEEP),
    _post("/v1/unload_lora_adapter", "Unload an adapter.", None, adapters.unload_adapter_endpoint, _TEXT),
    _get(
        "/v1",
        "Check that the API is there; POST and OPTIONS do the same.",
        admin.Status,
        lambda _: health.OK,
        also=("POST", "OPTIONS"),
    ),
    Route("/v1/models", "get", "The served model and its adapters.", openai.ModelList),
    Route("/v1/models/{model_id}", "get", "One model.", openai.ModelCard, errors=(401, 403, 404, 503)),
    _get("/version", "The server's version.", admin.Version, health.version, errors=(401, 403)),
    _get(
        "/livez", "Check that the process and its step loop are alive.", admin.Status, health.livez, errors=(403, 503)
    ),
    _get("/readyz", "Check that the server accepts requests.", admin.Status, health.readyz, errors=(403, 503)),
    _get("/health_generate", "The same, by SGLang's name.", admin.Status, health.readyz),
    _get("/get_model_info", "The served model, in SGLang's form.", sglang_body.ModelInfo, sglang.model_info),
    _get("/model_info", "The same.", sglang_body.ModelInfo, sglang.model_info),
    _get("/get_server_info", "The same.", sglang_body.ModelInfo, sglang.model_info),
    _get("/server_info", "The same.", sglang_body.ModelInfo, sglang.model_info),
    _get("/health", "The state in detail.", admin.Health, health.health),
    _get("/v1/health", "The same.", admin.Health, health.health),
    _get("/stats", "What both processes measure about themselves.", admin.Stats, health.stats, errors=(401, 403)),
    _get("/metrics", "Metrics in Prometheus' text format.", None, health.metrics, errors=(401, 403)),
    Route("/v1/cache", "delete", "Empty the prefix cache, except for what requests and pins hold.", admin.CacheAnswer),
    Route("/v1/cache/prefixes", "get", "List the stored prefixes.", admin.PrefixList),
    _post(
        prefixes.PREFIXES, "Store a prefix in the cache.", admin.PrefixAnswer, prefixes.insert_prefix_endpoint, _KEEP
    ),
    Route("/v1/cache/prefixes/{prefix_id}", "get", "One prefix.", admin.PrefixAnswer, errors=(401, 403, 404, 503)),
    Route(
        "/v1/cache/prefixes/{prefix_id}",
        "delete",
        "Release a stored prefix.",
        admin.PrefixDeleted,
        errors=(401, 403, 404, 503, 504),
    ),
)

POSTS = {one.path: (one.body, one.endpoint) for one in ROUTES if one.body is not None and one.endpoint is not None}
"""Body types and endpoints of POST routes, by path."""
