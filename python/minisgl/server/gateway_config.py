"""What the gateway is told once, as JSON, when the engine is ready: everything that an answer depends on beside its
request (`rust/minisgl-gateway/src/config.rs` reads it).

Invariants: values are those that the Python server itself uses, resolved; the gateway has no limit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.config import MAX_PRIORITY, Limits, ServerConfig
from minisgl.message import GRAMMAR_REFUSED
from minisgl.message.heartbeat import TIMES
from minisgl.metrics.meters import WINDOW_NS
from minisgl.metrics.server_metrics import SECONDS, TOKENS
from minisgl.sampling_params import BOUNDS, LOGIT_BIAS, RANGES
from minisgl.server.app import Application
from minisgl.server.bodies import (
    TEMPLATE_NAMES,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    GenerateSampling,
)
from minisgl.server.callers import EXPOSED, HARMLESS, Callers
from minisgl.server.encoding import gives_embeddings
from minisgl.server.errors import (
    ApiError,
    engine_error,
    engine_gone,
    grammar_refused,
    internal_error,
    no_embedding,
    too_late,
    too_many_dimensions,
)
from minisgl.server.fields import Body
from minisgl.server.log import shows_access
from minisgl.server.messages.body import MessagesRequest
from minisgl.server.responses.body import ResponsesRequest
from minisgl.server.responses.store import MAX_BYTES, MAX_RESPONSES
from minisgl.server.routes import models
from minisgl.server.tools import Parsing
from minisgl.tokenizer import Tokenizer

VERSION = 5
"""The version of what is told. The extension reads one, and refuses others."""
BY_FIELDS = frozenset({"enable_thinking", "reasoning_effort"})
"""The arguments of a chat template that fields of requests set."""


BODIES: dict[str, type[Body]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "embedding": EmbeddingRequest,
    "generate": GenerateRequest,
    "generate_sampling": GenerateSampling,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
}


def encoded(config: ServerConfig, app: Application, tokenizer: Tokenizer, defaults: Mapping[str, Any]) -> bytes:
    """JSON, for a server whose engine is ready; its fields are described where they are read. Compiles the chat
    templates. Raises `ValueError` for texts that JSON cannot hold."""
    info = app.context.info
    callers = Callers.of(config)
    found = {
        "version": VERSION,
        "model_name": config.model_name,
        "aliases": sorted(app.context.served.aliases),
        "any_model_name": config.any_model_name,
        "models": msgspec.json.encode(models(app.context)).decode(),
        "max_seq_len": info.max_seq_len,
        "vocab_size": info.vocab_size,
        "simulated": bool(info.simulated),
        "chat_templates": {name: {"source": source, "content": shape} for name, source, shape in tokenizer.templates()},
        "template_variables": sorted(app.context.parsing.variables & BY_FIELDS),
        "template_names": sorted(TEMPLATE_NAMES),
        "thinking": None if (thinking := app.context.parsing.thinking) is None else thinking.name,
        "tools": _tools(app.context.parsing, config.tool_call_parser),
        "special_tokens": tokenizer.special_tokens,
        "defaults": dict(defaults),
        "fields": {name: _fields(model) for name, model in BODIES.items()},
        "limits": config.limits,
        "ranges": {**RANGES, "logit_bias": LOGIT_BIAS},
        "bounds": BOUNDS,
        "max_kept_answers": MAX_RESPONSES,
        "max_kept_bytes": MAX_BYTES,
        "max_priority": MAX_PRIORITY,
        "api_key": config.api_key,
        "api_keys": config.api_keys,
        "hosts": callers.hosts,
        "harmless_headers": [(name.decode(), value.decode()) for name, value in HARMLESS],
        "exposed_headers": EXPOSED.decode(),
        "cors_origins": callers.origins,
        "errors": _errors(config.limits),
        "embeds": gives_embeddings(info) and app.context.own_prompts.default is None,
        "writes": info.kind == "decoder",
        "pooling": app.context.pooling.name,
        "log": {
            "json": config.log_format == "json",
            "access": shows_access(config.access_log, config.engine.log_level),
            "probes": config.access_log_probes,
        },
        "metrics": {"seconds": SECONDS, "tokens": TOKENS, "window_s": WINDOW_NS / 1e9},
        "watch": TIMES,
    }
    return msgspec.json.encode(found)


def _errors(limits: Limits) -> dict[str, Any]:
    """What is said where a request fails that was accepted. A message is empty where the engine has the words."""
    asked, has = 10**15, 10**16
    few = _told(too_many_dimensions(asked, has))
    for name in ("openai", "anthropic"):
        error = few[name]["error"]
        text = error["message"].replace(str(has), "{has}").replace(str(asked), "{asked}")
        few[name]["error"] = {**error, "message": text}
    return {
        "grammar_refused": GRAMMAR_REFUSED,
        "engine": _told(engine_error("")),
        "grammar": _told(grammar_refused("")),
        "engine_gone": _told(engine_gone("")),
        "no_embedding": _told(no_embedding()),
        "dimensions": few,
        "too_late": _told(too_late(limits.request_timeout or 0.0)),
        "bug": _told(internal_error("panic")),
    }


def _told(error: ApiError) -> dict[str, Any]:
    return {"status": error.status, "code": error.code, "openai": error.body, "anthropic": error.anthropic_body()}


def _tools(parsing: Parsing, name: str) -> dict[str, Any] | None:
    """None: conversations with tools have a template of their own."""
    return None if parsing.has_own_template else {"name": name, "explained": not parsing.shows_tools}


def _fields(model: type[Body]) -> dict[str, list[Any] | None]:
    """All that is known, with the values that ask for nothing; None: what it asks for is done."""
    known: dict[str, list[Any] | None] = dict.fromkeys((*model.model_fields, *model.ALIASES))
    return known | {name: list(values) for name, values in model.NOT_YET.items()}
