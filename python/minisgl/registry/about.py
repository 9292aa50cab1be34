"""The routes about all models at once: their cards, health, and the figures of their servers.

Invariants: nothing here loads a model; the figures of a server come from that server, with its model's name added.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from minisgl.config import ConfigError
from minisgl.metrics.families import BATCH_LINES, Gauge
from minisgl.registry.keys import KeyLimits
from minisgl.registry.model import Model
from minisgl.registry.registry import Registry
from minisgl.server.apis.ollama.models import listed, running
from minisgl.server.core.formatter import json_response
from minisgl.server.core.passing import Headers, Lost, ask_whole, request_bytes

STARTED = int(time.time())
ANSWER_TIMEOUT_S = 5.0
_SAMPLE = re.compile(rb"([^{\s]+)(?:\{(.*)\})? (\S+)")
_FAMILY = re.compile(rb"# (?:HELP|TYPE) (\S+)")


class Asks:
    """A client that asks all loaded models' servers. `key` is an API key for the port's own requests."""

    def __init__(self, registry: Registry, key: str | None) -> None:
        self.registry = registry
        self._headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

    async def all(self, path: bytes, headers: Headers | None = None) -> dict[str, bytes]:
        """Send a GET request to all loaded servers and return the bodies of their 200 responses, by model. `headers`
        replace the port's own API key by a client's."""
        loaded = [each for each in self.registry.models.values() if each.server is not None]
        request = request_bytes("GET", path, self._headers if headers is None else headers)
        bodies = await asyncio.gather(*(self._one(model, request) for model in loaded))
        return {model.name: body for model, body in zip(loaded, bodies, strict=True) if body is not None}

    async def _one(self, model: Model, request: bytes) -> bytes | None:
        if model.server is None:
            return None
        try:
            status, _, body = await ask_whole(model.server.address, request, ANSWER_TIMEOUT_S)
        except Lost:
            return None
        return body if status == 200 else None


def card(model: Model) -> list[dict[str, Any]]:
    """Return a model's entries of /v1/models: the model, then its adapters."""
    entry = model.entry
    try:
        size, failure = entry.size(), model.failure.reason
    except ConfigError as error:
        size, failure = None, str(error)
    fields: dict[str, Any] = {
        "id": model.name,
        "object": "model",
        "created": STARTED,
        "owned_by": "minisgl",
        "root": entry.config.engine.shown_model,
        "max_model_len": model.seen.max_model_len,
        "state": model.state,
        "size": size,
        "memory": model.seen.most_bytes or None,
    }
    if model.seen.sees:
        fields["vision"] = True
    if entry.aliases:
        fields["aliases"] = list(entry.aliases)
    if entry.pin:
        fields["pinned"] = True
    if model.state == "loading":
        fields["doing"] = model.seen.doing
    if failure:
        fields["failure"] = failure
    of_adapter = {key: fields[key] for key in ("object", "created", "owned_by", "max_model_len", "state")}
    return [
        fields,
        *(
            {"id": name, **of_adapter, "root": name, "parent": model.name}
            for name in (*entry.adapters, *model.adapters)
        ),
    ]


def tags(registry: Registry, *, are_loaded: bool = False) -> dict[str, Any]:
    """Return the models as Ollama's API lists them: all, or those that are loaded."""
    shown: list[dict[str, Any]] = []
    for model in registry.models.values():
        if are_loaded and model.state != "loaded":
            continue
        first, *adapters = card(model)
        names = [model.name, *(one["id"] for one in adapters)]
        cards = listed(names, STARTED, first["size"] or 0, model.name)
        shown += running(cards, model.seen.used_bytes, model.seen.max_model_len or 0, "") if are_loaded else cards
    return {"models": shown}


def health(registry: Registry, draining: bool) -> dict[str, Any]:
    models = registry.models.values()
    return {
        "status": "draining" if draining else "ok",
        "memory": {
            "budget": registry.budget,
            "set_aside": registry.set_aside,
            "used": sum(m.seen.used_bytes for m in models),
        },
        "requests_waiting": registry.num_waiting,
        "models": {
            model.name: {
                "state": model.state,
                "requests": model.use.num_serving,
                "waiting": len(model.waiting),
                "used_bytes": model.seen.used_bytes,
                "load_s": round(model.seen.load_s, 3),
                **({"failure": model.failure.reason} if model.failure.reason else {}),
            }
            for model in models
        },
    }


async def stats(asks: Asks) -> Response:
    """Answer GET /stats with the stats of each loaded server."""
    bodies = await asks.all(b"/stats")
    return json_response({"models": {name: msgspec.Raw(body) for name, body in bodies.items()}})


async def metrics(asks: Asks, limits: KeyLimits, lines: Mapping[str, int] | None) -> Response:
    """Answer GET /metrics with the families of all servers, each family once, and with the port's own."""
    families = dict[bytes, tuple[list[bytes], list[bytes]]]()
    for name, body in ((await asks.all(b"/metrics")) | {"": _own(asks.registry, limits, lines)}).items():
        heads, samples = list[bytes](), list[bytes]()
        for line in body.splitlines():
            if (match := _FAMILY.match(line)) is not None:
                heads, samples = families.setdefault(match[1], ([], []))
                if line not in heads:
                    heads.append(line)
            elif line and not line.startswith(b"#"):
                samples.append(_named(line, name))
    text = b"".join(line + b"\n" for heads, samples in families.values() for line in (*heads, *samples))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _named(sample: bytes, model: str) -> bytes:
    """Return a sample with the label `model_name` added, unless it has one."""
    if not model or b'model_name="' in sample:
        return sample
    if (match := _SAMPLE.fullmatch(sample)) is None:
        return sample
    name, labels, value = match.groups()
    return b'%b{model_name="%b"%b} %b' % (name, model.encode(), b"," + labels if labels else b"", value)


def _own(registry: Registry, limits: KeyLimits, of_batches: Mapping[str, int] | None) -> bytes:
    def of_each(figure: Callable[[Model], float]) -> dict[str, float]:
        return {f'model_name="{name}"': figure(model) for name, model in registry.models.items()}

    rows = [
        ("model_loaded", "gauge", "1 if the model is loaded, else 0", of_each(lambda model: model.state == "loaded")),
        ("model_memory_bytes", "gauge", "bytes of the model's server", of_each(lambda model: model.seen.used_bytes)),
        ("model_requests_waiting", "gauge", "requests that wait for it", of_each(lambda model: len(model.waiting))),
        ("model_requests_serving", "gauge", "requests that it answers", of_each(lambda model: model.use.num_serving)),
        ("model_loads_total", "counter", "loads of the model", of_each(lambda m: registry.num_loads[m.name])),
        (
            "model_unloads_total",
            "counter",
            "unloads of the model",
            of_each(lambda m: registry.num_unloads[m.name]),
        ),
    ]
    keys = limits.use.counts
    waiting: dict[str, float] = {f'key="{one.name}"': limits.num_waiting(number) for number, one in enumerate(keys)}
    refused: dict[str, float] = {
        f'key="{one.name}",limit="{limit}"': n for one in keys for limit, n in one.refused.items()
    }
    rows.append(("key_requests_waiting", "gauge", "waiting requests of an API key", waiting))
    rows.append(("key_refused_total", "counter", "HTTP requests that a limit of their API key refused", refused))
    if of_batches is not None:
        for name, meaning, family in BATCH_LINES:
            kind, end = ("gauge", "") if family is Gauge else ("counter", "_total")
            rows.append((f"batch_lines_{name}{end}", kind, meaning, {"": of_batches[name]}))
    lines = list[str]()
    for name, kind, meaning, values in rows:
        lines += [f"# HELP minisgl:{name} {meaning}", f"# TYPE minisgl:{name} {kind}"]
        lines += [f"minisgl:{name}{{{labels}}} {float(value)}" for labels, value in values.items()]
    return "\n".join(lines).encode()
