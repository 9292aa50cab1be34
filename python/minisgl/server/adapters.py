"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Invariants: a name is served from when every engine has its adapter until it is unloaded; requests under way keep
theirs. Folders lie below the one of the configuration, and of all that does not, the same is said.
"""

from __future__ import annotations

import asyncio
import os

from starlette.responses import PlainTextResponse, Response

from minisgl.frontend.adapters import Adapter
from minisgl.frontend.engine_client import EngineGone
from minisgl.server.bodies import LoadAdapterRequest, UnloadAdapterRequest
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value, engine_gone, too_late
from minisgl.server.prefixes import Later
from minisgl.server.request import HttpRequest

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def load_adapter_endpoint(context: ServerContext, asked: LoadAdapterRequest, request: HttpRequest) -> Later:
    name, root = asked.lora_name, _check_may(context, request)
    if name == context.model_name or name in context.aliases:
        raise ApiError(
            400, f"lora_name: {name[:80]!r} is the model's own name", param="lora_name", code="invalid_value"
        )
    if name in context.client.adapters.by_name:
        text = f"lora_name: {name[:80]!r} is loaded already: unload it first, or choose another name"
        raise ApiError(400, text, param="lora_name", code="invalid_value")
    if (count := len(context.client.adapters.by_name)) >= context.max_loras:
        text = f"lora_name: {name[:80]!r}: there are {count} adapters, the limit (max_loras): unload one first"
        raise ApiError(400, text, param="lora_name", code="invalid_value")
    adapter = context.client.adapters.load(name, _below(root, asked.lora_path))
    return Later(lambda: _loaded(context, adapter))


def _check_may(context: ServerContext, request: HttpRequest) -> str:
    """The folder of adapters. Raises `ApiError` 403."""
    if context.lora_folder is None:
        reason = "adapters are not loaded over HTTP here: lora_folder, a key of --config, allows it"
    elif not context.keys.may_load(request.key):
        reason = f"API key {request.key_name}: may not load adapters (lora in its entry of the key file)"
    else:
        return context.lora_folder
    raise ApiError(403, f"{request.path}: {reason}", code="not_allowed")


def _below(root: str, path: str) -> str:
    """Where the adapter lies. What lies elsewhere, and what is not there, is refused in one and the same way."""
    top = os.path.realpath(root)
    found = os.path.normpath(os.path.join(top, path))
    if "\0" not in path and found.startswith(f"{top}{os.sep}"):  # nothing else is looked at
        found = os.path.realpath(found)
        if found.startswith(f"{top}{os.sep}") and os.path.isdir(found):
            return found
    raise bad_value("lora_path", path, "must be a folder below the server's folder of adapters (lora_folder)")


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


async def unload_adapter_endpoint(
    context: ServerContext, asked: UnloadAdapterRequest, request: HttpRequest
) -> Response:
    _check_may(context, request)
    book = context.client.adapters
    adapter = book.by_name.get(asked.lora_name)
    if adapter is None or not adapter.is_ready:
        text = f"lora_name: {asked.lora_name[:80]!r} does not exist here"
        raise ApiError(404, text, param="lora_name", code="model_not_found")
    book.unload(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.")
