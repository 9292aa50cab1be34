"""Schemas without the properties that nobody named: whoever reads the answer takes no others, and a small model goes on
with an object that may go on.

Invariants: what fits the closed schema fits the given one; where closing could leave nothing that fits, it stays as is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# beside these it is not the properties alone that say what an object may have
_MORE = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *(
            "dependentSchemas",
            "dependentRequired",
            "dependencies",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "$ref",
            "$dynamicRef",
        ),
    )
)
_OF_NAMES = ("properties", "$defs", "definitions")
_OF_LISTS = ("prefixItems", "anyOf", "oneOf")


def closed(schema: Any) -> Any:
    """With `additionalProperties` false at each object that names its properties."""
    return _closed(schema) if isinstance(schema, Mapping) and not _has_all_of(schema) else schema


def _has_all_of(schema: Any) -> bool:
    """Then an object may be described in several places."""
    if isinstance(schema, Mapping):
        return "allOf" in schema or any(_has_all_of(one) for one in schema.values())
    return isinstance(schema, list) and any(_has_all_of(one) for one in schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _OF_NAMES:
        if isinstance(given := schema.get(name), Mapping):
            found[name] = {key: _closed(one) for key, one in given.items()}
    if isinstance(schema.get("items"), Mapping):
        found["items"] = _closed(schema["items"])
    for name in _OF_LISTS:
        if isinstance(given := schema.get(name), list) and "properties" not in schema:
            found[name] = [_closed(one) for one in given]
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and properties and not _MORE & schema.keys():
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in properties for name in required):
            found["additionalProperties"] = False
    return found
