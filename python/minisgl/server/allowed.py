"""What may stand in a place of a body, in words: of all kinds that the field takes, not of the one that was tried."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minisgl.server.fields import Body

Schema = dict[str, Any]
Part = str | int
_ONE_AND_MANY = {
    "string": ("text", "texts"),
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "object": ("an object", "objects"),
    "array": ("a list", "lists"),
}
OF_ERRORS = {
    "string_type": "string",
    "int_type": "integer",
    "int_from_float": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "literal_error": "string",
}
"""Errors that say that a value is of another kind: of which one, for the parser that was tried."""


def path_of(given: Any, loc: Sequence[Part], *, is_missing: bool) -> list[Part]:
    """Where in `given` an error is: between the names in `loc` stand tags of what was tried. The last one `is_missing`
    there."""
    found: list[Part] = []
    for i, part in enumerate(loc):
        is_there = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if is_there:
            given = given[part]
        if is_there or (is_missing and i == len(loc) - 1):
            found.append(part)
    return found


def allowed(model: type[Body], path: Sequence[Part], given: Any, error: str) -> str:
    """`path` leads to the value in `given`; `error` is a key of `OF_ERRORS`."""
    root = _schema_of(model)
    found: list[Schema] = [root]
    for part in path:
        found = [one for schema in _that_fit(found, root, given, part) for one in _within(schema, part)]
        given = given[part]
    left = list(_flat(found, root))
    if not left or any(one.get("type") in _types_of(given) and not _names([one]) for one in left):
        left = [{"type": OF_ERRORS[error]}]  # it is of an allowed kind, but not beside what stands around it
    *others, last = dict.fromkeys(kind for one in left for kind in _kinds(one, root))
    return f"{', '.join(others)} or {last}" if others else last


@functools.cache
def _schema_of(model: type[Body]) -> Schema:
    return model.model_json_schema()


def _flat(schemas: Iterable[Schema], root: Schema) -> Iterator[Schema]:
    """Alternatives one by one, but for null."""
    for one in schemas:
        if "$ref" in one:
            yield from _flat([root["$defs"][one["$ref"].rsplit("/", 1)[-1]]], root)
        elif choices := one.get("anyOf") or one.get("oneOf"):
            yield from _flat(choices, root)
        elif one.get("type") != "null":
            yield one


def _that_fit(schemas: Iterable[Schema], root: Schema, given: Any, part: Part) -> list[Schema]:
    """Those of the `type` that an object names or, if it names none, that need none; all, if none fits."""
    found = list(_flat(schemas, root))
    if not isinstance(given, dict) or part == "type":
        return found
    if "type" not in given:
        return [one for one in found if "type" not in one.get("required", ())] or found
    name = json.dumps(given["type"])

    def fits(one: Schema) -> bool:
        return name in _names(_flat([one.get("properties", {}).get("type", {})], root))

    return [one for one in found if fits(one)] or found


def _names(schemas: Iterable[Schema]) -> list[str]:
    return [json.dumps(name) for one in schemas for name in one.get("enum", [one["const"]] if "const" in one else [])]


def _within(schema: Schema, part: Part) -> list[Schema]:
    if isinstance(part, int):
        found = schema.get("items")
    else:
        found = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
    return [found] if isinstance(found, dict) else []


def _kinds(schema: Schema, root: Schema, number: int = 0) -> list[str]:
    """In words; `number`: 1 for many of it."""
    if names := _names([schema]):
        return names
    kind = schema.get("type", "")
    items = [one for item in _flat(_within(schema, 0), root) for one in _kinds(item, root, 1)]
    word = _ONE_AND_MANY[kind][number] if kind in _ONE_AND_MANY else "any value"
    return [f"{word} of {' and '.join(dict.fromkeys(items))}" if kind == "array" and items else word]


def _types_of(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    words: dict[type[object], str] = {float: "number", str: "string", list: "array", dict: "object"}
    return (words.get(type(value), "null"),)
