"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM.

Invariants: a name is served from when every engine has its adapter until it is unloaded; running requests keep theirs.
Adapters must lie below the configured folder; every other path gets the same error, whether or not it exists.
"""

from __future__ import annotations

import os

from starlette.responses import PlainTextResponse, Response

from minisgl.frontend.adapters import Adapter
from minisgl.server.admin.body import LoadAdapterRequest, UnloadAdapterRequest
from minisgl.server.admin.prefixes import in_time
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import NO_MODEL, ApiError, bad_value, wrong
from minisgl.server.core.formatter import Deferred
from minisgl.server.core.request import HttpRequest

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def load_adapter_endpoint(context: ServerContext, body: LoadAdapterRequest, request: HttpRequest) -> Deferred:
    name, root = body.lora_name, _check_may(context, request)
    if name == context.served.name or name in context.served.aliases:
        raise wrong("lora_name", f"{name[:80]!r} is the model's own name: choose another name")
    if name in context.client.adapters.by_name:
        raise wrong("lora_name", f"{name[:80]!r} is loaded already: unload it first, or choose another name")
    if (count := len(context.client.adapters.by_name)) >= context.config.max_loras:
        reason = f"there are {count} adapters, the limit (max_loras): unload one first"
        raise wrong("lora_name", f"{name[:80]!r}: {reason}")
    adapter = context.client.adapters.load(name, _below(root, body.lora_path))
    return Deferred(lambda: _loaded(context, adapter))


def _check_may(context: ServerContext, request: HttpRequest) -> str:
    """Check that the request may change adapters and return the folder of adapters. Raises `ApiError` 403."""
    if context.config.lora_folder is None:
        reason = "loading adapters over HTTP is off: set lora_folder, a key of --config"
        raise ApiError(403, f"{request.path}: {reason}", code="not_allowed")
    context.keys.check_may(request.key, "lora", request.path)
    return context.config.lora_folder


def _below(root: str, path: str) -> str:
    """Return the adapter's folder. Raises one and the same `ApiError` 400 for a path outside `root` or missing."""
    top = os.path.realpath(root)
    folder = os.path.normpath(os.path.join(top, path))
    if "\0" not in path and folder.startswith(f"{top}{os.sep}"):  # no other path touches the disk
        folder = os.path.realpath(folder)
        if folder.startswith(f"{top}{os.sep}") and os.path.isdir(folder):
            return folder
    raise bad_value("lora_path", path, "must be a folder below the server's folder of adapters (lora_folder)")


async def _loaded(context: ServerContext, adapter: Adapter) -> Response:
    book = context.client.adapters
    async with in_time(context, lambda: book.unload(adapter)):
        await context.client.until(lambda: book.is_settled(adapter))
    if (refusal := adapter.refusal) is not None:
        raise wrong("lora_path", refusal)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")


async def unload_adapter_endpoint(context: ServerContext, body: UnloadAdapterRequest, request: HttpRequest) -> Response:
    _check_may(context, request)
    book = context.client.adapters
    adapter = book.by_name.get(body.lora_name)
    if adapter is None or not adapter.is_ready:
        raise wrong("lora_name", f"{body.lora_name[:80]!r} does not exist here", *NO_MODEL)
    book.unload(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.")
