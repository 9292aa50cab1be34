"""Configuration of the gateway: sent once, as JSON, when the engine is ready (`rust/minisgl-gateway/src/config.rs`
parses it).

Invariants: values are those that the Python server itself uses, resolved; the gateway has no limit of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.config import Limits, ServerConfig
from minisgl.message import GRAMMAR_REFUSED
from minisgl.message.heartbeat import TIMES
from minisgl.metrics.meters import WINDOW_NS
from minisgl.metrics.server_metrics import SECONDS, TOKENS
from minisgl.server.core.api_keys import names
from minisgl.server.core.callers import HARMLESS, Callers
from minisgl.server.core.errors import ApiError, engine_error, engine_gone, grammar_refused, internal_error, too_late
from minisgl.server.core.log import shows_access

VERSION = 8
"""Version of the configuration format. The extension accepts one, and refuses others."""


def encoded(config: ServerConfig) -> bytes:
    """Return the configuration as JSON; its fields are documented where the gateway parses them."""
    callers = Callers.of(config)
    config_fields = {
        "version": VERSION,
        "num_keys": len(names(config.api_keys)),
        "limits": config.limits,
        "silence": config.silence,
        "hosts": callers.hosts,
        "harmless_headers": [(name.decode(), value.decode()) for name, value in (*HARMLESS, *callers.cors_headers({}))],
        "errors": _errors(config.limits),
        "log": {
            "json": config.log_format == "json",
            "times": not config.managed,
            "access": shows_access(config.access_log, config.engine.log_level),
            "probes": config.access_log_probes,
        },
        "metrics": {"seconds": SECONDS, "tokens": TOKENS, "window_s": WINDOW_NS / 1e9},
        "watch": TIMES,
    }
    return msgspec.json.encode(config_fields)


def _errors(limits: Limits) -> dict[str, Any]:
    """Return the error responses for accepted requests that fail. A message is empty where the engine supplies it."""
    return {
        "grammar_refused": GRAMMAR_REFUSED,
        "engine": _error_fields(engine_error("")),
        "grammar": _error_fields(grammar_refused("")),
        "engine_gone": _error_fields(engine_gone("")),
        "too_late": _error_fields(too_late(limits.request_timeout or 0.0)),
        "bug": _error_fields(internal_error("panic")),
    }


def _error_fields(error: ApiError) -> dict[str, Any]:
    return {"status": error.status, "code": error.code, "body": error.body}
