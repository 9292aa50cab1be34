"""Routes for information about the model, as Ollama's clients request it, and refusals of those that fetch, copy or
delete models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from starlette.responses import Response

from minisgl.config import MODEL_SMOLLM2
from minisgl.server.apis.ollama.body import OllamaShowRequest
from minisgl.server.apis.ollama.described import described, parameter_size
from minisgl.server.core.context import ServerContext
from minisgl.server.core.embeddings import gives_embeddings
from minisgl.server.core.errors import ApiError
from minisgl.server.core.formatter import json_response
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.resume import fingerprint
from minisgl.utils.installed import find_smollm2, own_version

VERSION = "0.12.11"
"""Ollama version that is reported; clients refuse versions that are too old for them."""
NEVER = "9999-12-31T23:59:59Z"
REFUSED = {
    "/api/pull": ("POST", "cannot fetch others: start it with the model that you want"),
    "/api/push": ("POST", "cannot push it"),
    "/api/create": ("POST", "cannot create others"),
    "/api/copy": ("POST", "cannot copy it: --served-model-name gives the model another name"),
    "/api/delete": ("DELETE", "cannot delete it"),
}
"""Routes that need several models, with their methods and the reason of the refusal."""


def _config(folder: Path | None) -> dict[str, Any]:
    try:
        config = json.loads(((folder or Path("none")) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _metadata(context: ServerContext, files: Sequence[Path]) -> dict[str, Any]:
    folder = context.info.model_dir
    return described(_config(None if folder is None else Path(folder)), files, context.served.name)


def _files(context: ServerContext) -> list[Path]:
    """Return the local weight files: the GGUF file itself, or the safetensors files of the folder."""
    model, folder = context.config.engine.model, context.info.model_dir
    given = Path(model).expanduser()
    if model == MODEL_SMOLLM2 and not given.exists():
        given = find_smollm2()
    if given.is_file():
        return [given]
    return [] if folder is None else [*Path(folder).glob("*.safetensors")]


def listed(
    names: Iterable[str],
    created: float,
    size: int,
    key: str,
    *,
    family: str = "",
    dtype: str = "",
    form: str = "",
    size_label: str = "",
) -> list[dict[str, Any]]:
    """Return entries of /api/tags, one per name (the model and its adapters). `key`: hashed to the digest; `form`: the
    files' format; `size_label`: the parameter count as text."""
    card = {
        "modified_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "size": size,
        "digest": hashlib.sha256(key.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": form,
            "family": family,
            "families": [family] if family else [],
            "parameter_size": size_label,
            "quantization_level": dtype,
        },
    }
    return [{"name": name, "model": name, **card} for name in names]


def running(cards: Iterable[dict[str, Any]], num_bytes: int, context_len: int, device: str) -> list[dict[str, Any]]:
    """Return entries of /api/ps for `cards`. `num_bytes`: resident memory of the engine processes."""
    on_device = num_bytes if device.startswith("cuda") else 0
    more = {"size": num_bytes, "size_vram": on_device, "context_length": context_len, "expires_at": NEVER}
    return [{**one, **more} for one in cards]


def _cards(context: ServerContext) -> list[dict[str, Any]]:
    files, info, served = _files(context), context.info, context.served
    metadata = _metadata(context, files)
    family = metadata.get("general.architecture", "unknown")
    return listed(
        [served.name, *(adapter.name for adapter in context.client.adapters.ready())],
        served.created,
        sum(file.stat().st_size for file in files),
        fingerprint(served.name, info),
        family="" if family == "unknown" else family,
        dtype=info.dtype,
        form="gguf" if any(file.suffix == ".gguf" for file in files) else "safetensors",
        size_label=parameter_size(metadata),
    )


def loaded(context: ServerContext) -> dict[str, Any]:
    info, engines = context.info, context.client.engines
    resident = sum(view.stats.resident_bytes for view in engines if view.stats is not None)
    return {"models": running(_cards(context), resident, info.max_seq_len, info.device)}


def version() -> dict[str, Any]:
    return {"version": VERSION, "minisgl": own_version()}


async def show_endpoint(context: ServerContext, body: OllamaShowRequest, request: HttpRequest) -> Response:
    name = context.served.check(body.model or body.name)
    card = next(one for one in _cards(context) if one["name"] == name)
    metadata = {"general.architecture": "unknown", **_metadata(context, _files(context))}
    family = metadata["general.architecture"]
    return json_response(
        {
            "modelfile": f"FROM {name}",
            "parameters": "\n".join(f"{name} {value}" for name, value in context.served.defaults.items()),
            "template": context.tokenizer.template_source(),
            "details": card["details"],
            "model_info": {**metadata, f"{family}.context_length": context.info.max_seq_len},
            "capabilities": _capabilities(context),
            "modified_at": card["modified_at"],
        }
    )


def _capabilities(context: ServerContext) -> list[str]:
    has = {
        "completion": True,
        "vision": context.info.sees,
        "tools": context.parsing.shows_tools,
        "thinking": context.parsing.thinking is not None,
        "insert": context.prompts.fills_in,
        "embedding": gives_embeddings(context.info),
    }
    return [name for name, is_there in has.items() if is_there]


def tags(context: ServerContext) -> dict[str, Any]:
    return {"models": _cards(context)}


def refuse(path: str, _: ServerContext) -> NoReturn:
    raise ApiError(501, f"{path}: this server has one model and {REFUSED[path][1]}", code="not_implemented")
