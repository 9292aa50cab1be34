"""/v1/cache: pinned prefixes in the prefix cache of every engine, and clearing the cache.

Invariants: a prefix that one engine refuses is removed from all; a waiting client is answered when the last engine is
done, after `--request-timeout` at the latest; the text of a prefix is never shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.engine_client import EngineGone
from minisgl.frontend.prefixes import FAILED, Prefix
from minisgl.sampling_params import SamplingParams
from minisgl.server.admin.body import PrefixRequest
from minisgl.server.core.bodies import Conversation
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import ApiError, bad_value, engine_error, engine_gone, too_late, wrong
from minisgl.server.core.formatter import Deferred, json_response
from minisgl.server.core.request import REQUEST, HttpRequest
from minisgl.server.core.routes import Routes
from minisgl.step import Int32Array

CACHE = "/v1/cache"
PREFIXES = f"{CACHE}/prefixes"
_ID = re.compile(r"prefix-([1-9][0-9]{0,17})", re.ASCII)


async def insert_prefix_endpoint(context: ServerContext, body: PrefixRequest, request: HttpRequest) -> Deferred:
    context.keys.check_may(request.key, "cache", request.path)
    if context.served.check(body.model) != context.served.name:
        raise bad_value("model", body.model, "prefixes can be stored for the model itself only, not for adapters")
    tokens = await _tokens(context, body)
    pin, waits = body.pin is not False, body.wait is not False
    return Deferred(lambda: _insert(context, tokens, pin=pin, waits=waits))


async def _tokens(context: ServerContext, body: PrefixRequest) -> Int32Array:
    given = [name for name in ("text", "messages", "token_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise wrong("text", "give one of text, messages and token_ids")
    field = given[0]
    if body.messages is None:
        prompt: Conversation | list[str | list[int]] = [body.text if body.text is not None else body.token_ids or []]
    elif not body.messages:
        raise bad_value("messages", [], "must not be empty")
    elif body.add_generation_prompt is None:  # the next message is not known yet
        prompt = body.model_copy(update={"add_generation_prompt": False})
    else:
        prompt = body
    (tokens,), _ = await context.prompts.encode(prompt, SamplingParams(), None, field)
    return tokens


async def _insert(context: ServerContext, tokens: Int32Array, *, pin: bool, waits: bool) -> Response:
    book = context.client.prefixes
    async with in_time(context):
        prefix = book.insert(tokens, pin=pin)
        await context.client.until(lambda: book.is_answered(prefix))
        if waits:
            await context.client.until(lambda: book.is_settled(prefix))
    if (refusal := prefix.refusal) is not None:
        book.remove(prefix)
        if refusal.state == FAILED:
            raise engine_error(f"prefix: {refusal.reason}")
        if refusal.is_full:
            more = ": remove a pinned prefix, or raise --max-pinned-ratio" if refusal.reason.startswith("pin:") else ""
            raise ApiError(409, f"prefix: {refusal.reason}{more}", code="cache_full")
        raise ApiError(400, f"prefix: {refusal.reason}", code="invalid_value")
    answer = json_response(_card(context, prefix))
    answer.status_code = 200 if book.is_settled(prefix) else 202
    return answer


@contextlib.asynccontextmanager
async def in_time(context: ServerContext, give_up: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    limit = context.limits.request_timeout
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        give_up()
        raise too_late(limit or 0.0) from error
    except EngineGone as error:
        raise engine_gone(str(error)) from error


def _card(context: ServerContext, prefix: Prefix) -> dict[str, Any]:
    book = context.client.prefixes
    hits = book.num_hits(prefix)
    refusal = prefix.refusal
    engines = [
        {"engine": engine, "state": prefix.state(engine), "hits": hits.get(engine, 0)}
        for engine in sorted(context.client.serving())
    ]
    return {
        "id": f"prefix-{prefix.prefix_id}",
        "object": "cache.prefix",
        "tokens": prefix.num_tokens,
        "pages": prefix.num_tokens // context.info.page_size,
        "pinned": prefix.pin,
        "state": refusal.state if refusal is not None else "ready" if book.is_settled(prefix) else "warming",
        **({"reason": refusal.reason} if refusal is not None else {}),
        "hits": sum(hits.values()),
        "engines": engines,
    }


def _found(context: ServerContext, name: str) -> Prefix:
    known = _ID.fullmatch(name)
    prefix = context.client.prefixes.prefixes.get(int(known[1])) if known else None
    if prefix is None:
        raise ApiError(404, f"prefix: {name[:80]!r} does not exist", param="prefix_id", code="prefix_not_found")
    return prefix


def add_cache(app: Routes, context: ServerContext) -> None:
    """Add the GET and DELETE routes of the cache. POST is declared for the OpenAPI page; `Posts` handles it."""
    book = context.client.prefixes

    def check(request: Request) -> None:
        context.keys.check_may(request.scope[REQUEST].key, "cache", request.url.path)
        _ = context.info

    @app.on(PREFIXES, "GET", "POST")
    async def prefixes(request: Request) -> Response:
        check(request)
        cards = [_card(context, prefix) for prefix in book.prefixes.values()]
        return json_response({"object": "list", "data": cards})

    @app.on(PREFIXES + "/{prefix_id}", "GET")
    async def prefix(request: Request, prefix_id: str) -> Response:
        check(request)
        return json_response(_card(context, _found(context, prefix_id)))

    @app.on(PREFIXES + "/{prefix_id}", "DELETE")
    async def remove(request: Request, prefix_id: str) -> Response:
        check(request)
        prefix = _found(context, prefix_id)
        async with in_time(context):
            book.remove(prefix)
            await context.client.until(lambda: book.is_removed(prefix))
        return json_response({"id": prefix_id, "object": "cache.prefix", "deleted": True})

    @app.on(CACHE, "DELETE")
    async def clear(request: Request) -> Response:
        check(request)
        async with in_time(context):
            clearing = book.clear()
            await context.client.until(lambda: book.is_cleared(clearing))
        freed = sorted(clearing.num_pages.items())
        return json_response(
            {
                "object": "cache",
                "freed_pages": sum(clearing.num_pages.values()),
                "engines": [{"engine": engine, "freed_pages": num_pages} for engine, num_pages in freed],
            }
        )
