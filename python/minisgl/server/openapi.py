"""The OpenAPI page: every route with its request body and its responses. /docs is the same as self-contained HTML,
without scripts or other hosts.

Invariants: bodies and responses are those of routes.py; an app route that is missing there is an error at start; text
of a schema is escaped in the HTML. The schemas take as long to make as the rest of a start, so they are made once, in a
thread, for the first reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.admin import body as admin
from minisgl.server.admin.live import STREAM
from minisgl.server.apis.anthropic.body import AnthropicErrorAnswer
from minisgl.server.apis.ollama.body import OllamaError
from minisgl.server.core import answers
from minisgl.server.core.errors import is_anthropic, is_ollama
from minisgl.server.core.formatter import json_response
from minisgl.server.core.routes import Routes
from minisgl.server.core.streams import STREAMED
from minisgl.server.routes import ROUTES, Route
from minisgl.utils.installed import own_version

WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true/false",
    "object": "object",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
:root { color-scheme: light dark }
code { font: 13px ui-monospace, monospace }
details { border: 1px solid #8886; border-radius: 6px; margin: .5em 0; padding: .4em .8em }
summary { cursor: pointer }
pre { overflow-x: auto; background: #8882; padding: .6em; border-radius: 6px }
table { border-collapse: collapse }
td, th { text-align: left; vertical-align: top; border-top: 1px solid #8884; padding: .2em .8em .2em 0 }
"""
_HASH = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_REF = "#/components/schemas/{model}"
_NAMES = re.compile(r"\{(\w+)\}")
_REASONS = {
    400: "A bad value; `error.param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The host or the origin of the request may not use this server.",
    404: "No such model, prefix, answer, file, batch or route.",
    408: "The body arrived too slowly.",
    409: "A limit of pins, adapters, files or batches is reached, or the object is in use or has ended.",
    413: "The body is too large.",
    415: "`Content-Type` must be `application/json`, or `multipart/form-data` for a file.",
    429: "Too many requests are queued; try again after `Retry-After` seconds.",
    500: "The engine failed on this request.",
    501: "This server has one model, or no folder for files and batches.",
    503: "The engine is not ready or has failed, or the server is draining.",
    504: "The request took longer than the server allows.",
}


def add_pages(app: Routes) -> None:
    """Add /openapi.json and /docs. Raises `RuntimeError` if the app has a route that `ROUTES` lacks, or the reverse."""
    served = {_name(getattr(route, "path", "")) for route in app.routes} - {STREAM}  # which is endless
    if missing := served ^ {route.path for route in ROUTES}:
        raise RuntimeError(f"routes and their descriptions differ: {', '.join(sorted(missing))}")
    made: asyncio.Task[tuple[dict[str, Any], str]] | None = None

    async def pages() -> tuple[dict[str, Any], str]:
        nonlocal made
        if made is None:
            made = asyncio.create_task(_pages())
        return await asyncio.shield(made)

    @app.on("/openapi.json", "GET")
    async def openapi(_: Request) -> Response:
        return json_response((await pages())[0])

    @app.on("/docs", "GET")
    async def docs(_: Request) -> Response:
        headers = {"content-security-policy": POLICY}
        return Response((await pages())[1], media_type="text/html", headers=headers)


async def _pages() -> tuple[dict[str, Any], str]:
    """Make the OpenAPI document and its HTML in a thread. The bodies' validators are completed before, here: requests
    use them in this thread, and pydantic does not say that two threads may complete one."""
    for route in ROUTES:
        if route.body is not None:
            route.body.model_rebuild()
            await asyncio.sleep(0)
    page = await asyncio.to_thread(_page)
    return page, docs_page(page)


def _name(path: str) -> str:
    """Return a route's path without Starlette's converters (":path"), which OpenAPI does not have."""
    return path.replace(":path}", "}")


def _page() -> dict[str, Any]:
    models: set[Any] = {m for route in ROUTES for m in (route.body, route.answer) if m is not None}
    models |= {answers.ErrorAnswer, AnthropicErrorAnswer, OllamaError}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": own_version()},
        "paths": _paths(),
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _paths() -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return paths


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "responses": _responses(route)}
    if 401 in route.errors:
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
    if names := _NAMES.findall(route.path):
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _as(route.body_type, route.body)}
    return operation


def _responses(route: Route) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if route.answer is None else _json(route.answer)
    for kind_of_stream in STREAMED.get(route.path, ()):
        content[kind_of_stream] = {}  # no schema: readers disagree whether it would describe one event or the stream
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if route.body is admin.PrefixRequest:
        responses["202"] = {"description": "Accepted, but not ready on every engine yet.", "content": content}
    error: type[BaseModel] = answers.ErrorAnswer
    if is_anthropic(route.path):
        error = AnthropicErrorAnswer
    elif is_ollama(route.path):
        error = OllamaError
    for status in route.errors:
        responses[str(status)] = {"description": _REASONS[status], "content": _json(error)}
    return responses


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return _as("application/json", model)


def _as(media_type: str, model: type[BaseModel]) -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(model=model.__name__)}}}


# --------------------------------------------------------------------------------------------------------- as HTML


def docs_page(page: dict[str, Any]) -> str:
    """Return an OpenAPI document as an HTML page."""
    title = f"{page['info']['title']} {page['info']['version']}"
    routes = [
        _html_route(method, path, operation)
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [_schema(name, schema) for name, schema in page["components"]["schemas"].items()]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n"
        '<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>\n'
        f"<h2>Routes</h2>\n{''.join(routes)}<h2>Bodies and answers</h2>\n{''.join(schemas)}</body></html>\n"
    )


def _html_route(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = []
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body: {_content(body['content'])}</p>")
        is_form = "multipart/form-data" in body["content"]
        how = "-F purpose=batch -F file=@FILE" if is_form else "-H 'Content-Type: application/json' -d '{...}'"
        command = f"curl HOST{path} {how}"
        parts.append(f"<pre><code>{escape(command)}</code></pre>")
    rows = [
        f"<tr><td>{status}</td><td>{_content(answer['content'])}</td><td>{escape(answer['description'])}</td></tr>"
        for status, answer in operation["responses"].items()
    ]
    parts.append(f"<table>{''.join(rows)}</table>")
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>\n"


def _content(content: dict[str, Any]) -> str:
    return ", ".join(_shown(one.get("schema", {}), kind) for kind, one in content.items())


def _shown(schema: dict[str, Any], otherwise: str) -> str:
    if "$ref" not in schema:
        return escape(otherwise)
    name = escape(_ref_name(schema))
    return f'<a href="#{name}">{name}</a>'


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for field, one in schema.get("properties", {}).items():
        limits = bounds(one)
        shown = kind(one) + (f", {limits}" if limits else "") + (" (required)" if field in required else "")
        about = escape(one.get("description", ""))
        rows.append(f"<tr><td><code>{escape(field)}</code></td><td>{escape(shown)}</td><td>{about}</td></tr>")
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>\n<table>{"".join(rows)}</table>\n'


def kind(schema: dict[str, Any]) -> str:
    """Describe a schema's type in words: `whole number`, `list of text`, the name of another body."""
    if "$ref" in schema:
        return _ref_name(schema)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        kinds = [kind(one) for one in choices if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return WORDS.get(schema.get("type", ""), "any")


def bounds(schema: dict[str, Any]) -> str:
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
    return ", ".join(f"{sign} {schema[name]:g}" for name, sign in signs if name in schema)


def _ref_name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]
