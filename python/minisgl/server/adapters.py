"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Invariants: a name is served from when every engine has its adapter until it is unloaded; requests under way keep
theirs.
"""

from __future__ import annotations

import asyncio

from starlette.responses import PlainTextResponse, Response

from minisgl.frontend.adapters import Adapter
from minisgl.frontend.engine_client import EngineGone
from minisgl.server.bodies import LoadAdapterRequest, UnloadAdapterRequest
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, engine_gone, too_late
from minisgl.server.prefixes import Later

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def load_adapter_endpoint(context: ServerContext, asked: LoadAdapterRequest) -> Later:
    name = asked.lora_name
    if name == context.model_name or name in context.aliases:
        raise ApiError(
            400, f"lora_name: {name[:80]!r} is the model's own name", param="lora_name", code="invalid_value"
        )
    if name in context.client.adapters.by_name:
        text = f"lora_name: {name[:80]!r} is loaded already: unload it first, or choose another name"
        raise ApiError(400, text, param="lora_name", code="invalid_value")
    adapter = context.client.adapters.load(name, asked.lora_path)
    return Later(lambda: _loaded(context, adapter))


async def _loaded(context: ServerContext, adapter: Adapter) -> Response:
    book, limit = context.client.adapters, context.limits.request_timeout
    try:
        async with asyncio.timeout(limit):
            await context.client.until(lambda: book.is_settled(adapter))
    except TimeoutError as error:
        book.unload(adapter)
        raise too_late(limit or 0.0) from error
    except EngineGone as error:
        raise engine_gone(str(error)) from error
    if (refusal := adapter.refusal) is not None:
        raise ApiError(400, f"lora_path: {refusal}", param="lora_path", code="invalid_value")
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")


async def unload_adapter_endpoint(context: ServerContext, asked: UnloadAdapterRequest) -> Response:
    book = context.client.adapters
    adapter = book.by_name.get(asked.lora_name)
    if adapter is None or not adapter.is_ready:
        text = f"lora_name: {asked.lora_name[:80]!r} does not exist here"
        raise ApiError(404, text, param="lora_name", code="model_not_found")
    book.unload(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.")
