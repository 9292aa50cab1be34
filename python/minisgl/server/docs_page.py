"""/docs: the OpenAPI page as HTML that needs nothing else, no script and no other host.

Keeps true: it says what /openapi.json says; text of the schema stands in it as text.
Doesn't know: routes, bodies.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from html import escape
from typing import Any

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


def docs_page(page: dict[str, Any]) -> str:
    """`page`: an OpenAPI document."""
    title = f"{page['info']['title']} {page['info']['version']}"
    routes = [
        _route(method, path, operation)
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


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = []
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body: {_content(body['content'])}</p>")
        command = f"curl HOST{path} -H 'Content-Type: application/json' -d '{{...}}'"
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
    name = escape(_name(schema))
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
    """A type in words: `whole number`, `list of text`, the name of another body."""
    if "$ref" in schema:
        return _name(schema)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        found = [kind(one) for one in choices if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(found)) or "null"
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


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]
