"""Routes for health and statistics, and the responses before the model is loaded.

Invariants: /livez and /readyz cost nothing and answer under full load; a long forward pass is no hang, a stopped
process or a stuck step loop is reported within 5 s; while the model loads, everything but /livez gets 503, with the
progress.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.extension import why_missing
from minisgl.frontend.engine_client import ProcessClient
from minisgl.metrics.engines import READY
from minisgl.metrics.families import scheduler_in_use
from minisgl.server.admin.live import general_stats
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import SERVER, ApiError, draining, loading
from minisgl.server.core.formatter import json_response
from minisgl.utils.installed import own_version

OK = {"status": "ok"}
DEGRADED = "degraded"  # some engines do not serve, others do


def trouble(client: ProcessClient, step_timeout_s: float) -> str | None:
    """Return the failure of the engine; `None` if it is well or loading. A forward pass may take `step_timeout_s`."""
    if client.failure is not None:
        return client.failure
    if client.info is None:
        return None  # loading
    return client.watchdog.trouble(step_timeout_s) or None


class Starting:
    """ASGI app that answers while the model is loading; never blocks."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._doing = "starting the engine"

    def report(self, text: str, done: int = 0, total: int = 0) -> None:
        """Set the progress to report to clients (a `progress.Report`)."""
        self._doing = f"{text}: {done} of {total}" if total else text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = f"the model is loading: {self._doing}"
        if scope["path"] == "/livez":
            answer = json_response(OK)
        elif scope["path"] == "/health":
            answer = json_response({"status": "loading", "model": self._model_name, "reason": reason})
            answer.status_code = 503
        else:
            answer = loading(reason).answer(scope)
        await answer(scope, receive, send)


def livez(context: ServerContext) -> dict[str, str]:
    """Report that the process and its step loop are alive. Raises `ApiError` 503 if not."""
    if (failure := trouble(context.client, context.limits.step_timeout)) is not None:
        raise ApiError(503, failure, kind=SERVER, code="not_alive")
    return OK


def readyz(context: ServerContext) -> dict[str, str]:
    """Report that new requests are served: loaded, warm, alive and not draining. Raises `ApiError` 503 if not. SGLang's
    `/health_generate` generates a token for that; here the step loop's heartbeat suffices."""
    livez(context)
    _ = context.info
    if context.draining:
        raise draining()
    if context.opening:
        raise loading("the gateway is starting")
    return OK


def health(context: ServerContext) -> Response:
    state = _health(context)
    answer = json_response(state)
    answer.status_code = 200 if state["status"] in ("ok", DEGRADED) else 503
    return answer


def version(context: ServerContext) -> dict[str, str]:
    return {"version": own_version()}


def stats(context: ServerContext) -> dict[str, Any]:
    return general_stats(context) | {"load": load(context)} | context.metrics.snapshot()


def metrics(context: ServerContext) -> Response:
    return Response(context.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def load(context: ServerContext) -> dict[str, float]:
    """Return the load, for routers: waiting and running requests, waiting prompt tokens, the fraction of KV pools that
    running requests hold, and the pools' capacity in tokens."""
    info, last = context.info, [view.stats for view in context.client.engines if view.stats is not None]
    num_pages = sum(stats.num_pages for stats in last)
    held = sum(stats.num_protected_pages + stats.num_held_pages for stats in last)
    return {
        "num_waiting": context.queue.num_requests,
        "num_running": sum(stats.num_running for stats in last),
        "queued_tokens": context.queue.num_tokens,
        "kv_use": held / num_pages if num_pages else 0.0,
        "kv_tokens": (num_pages or info.num_pages) * info.page_size,
    }


def _status(context: ServerContext, wrong: str | None) -> str:
    if wrong is not None:
        return "failed"
    if context.client.info is None:
        return "loading"
    if context.draining:
        return "draining"
    return "ok" if all(view.state == READY for view in context.client.engines) else DEGRADED


def _health(context: ServerContext) -> dict[str, Any]:
    client = context.client
    wrong = trouble(client, context.limits.step_timeout)
    state: dict[str, Any] = {
        "status": _status(context, wrong),
        "model": context.served.name,
        "frontend": "python" if context.gateway is None else "rust",
        "routing": context.config.routing_in_use,
        "requests_open": client.num_live + (0 if context.gateway is None else context.gateway.waiting()[2]),
        "requests_queued": context.queue.num_requests,
        "tasks": len(asyncio.all_tasks()),
    }
    if wrong is not None:
        state["reason"] = wrong
    if (info := client.info) is not None:
        names = ("engine", "device", "dtype", "max_seq_len", "page_size", "num_pages")
        state |= {name: getattr(info, name) for name in names}
        state["cpu_backend"] = scheduler_in_use(info, client.stats)
        state["cpu_backend_fallback"] = info.cpu_backend_fallback or None
        state["simulated"] = info.simulated or None
        state["engine_details"] = info.engine_details or None
    state["extension_missing"] = why_missing() or None
    now = time.monotonic()
    state["engines"] = [view.told(now) for view in client.engines]
    stats = client.stats
    state["stats"] = None
    if stats is not None:  # the other fields are in /stats
        plain = [name for name in stats.__struct_fields__ if name not in ("meters", "ranks", "prefixes")]
        state["stats"] = {name: getattr(stats, name) for name in plain}
    return state
