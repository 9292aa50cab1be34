"""JSON schemas of the kinds that JSONSchemaBench collects: calls of functions, records, resources of clusters, events,
recursive documents; some by hand, the rest drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = ["^[a-z]+$", "^\\d{3}-\\d{4}$", "^(foo|bar)?$", "[A-Z]{2,5}", "^[^\\s]{1,8}$", "^\\w+@\\w+\\.com$", "x"]
NAMES = ["name", "id", "type", "kind", "tags", "é", "a b", "$x", "spec", "metadata", 'q"', "0"]

BY_HAND: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array"},
    {},
    {"type": "string"},
    {"type": "boolean"},
    {"enum": ["a", 1, None, True, [1, "x"], {"k": []}]},
    {"const": {"nested": [1, 2, {"x": "y"}]}},
    {  # a function's arguments
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and country"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["location", "unit"],
        "additionalProperties": False,
    },
    {  # a record with references
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
            }
        },
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/address"}, "work": {"$ref": "#/$defs/address"}},
        "required": ["home"],
        "additionalProperties": False,
    },
    {  # a recursive document
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]},
    {  # a resource of a cluster
        "type": "object",
        "properties": {
            "apiVersion": {"const": "apps/v1"},
            "kind": {"const": "Deployment"},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,10}[a-z0-9])?$"}},
                "required": ["name"],
            },
            "spec": {
                "type": "object",
                "properties": {
                    "replicas": {"type": ["integer", "null"], "minimum": 0},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "ports": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"port": {"type": "integer", "minimum": 1, "maximum": 65535}},
                            "required": ["port"],
                        },
                        "minItems": 1,
                    },
                },
                "required": ["ports"],
            },
        },
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
    },
    {  # an event
        "type": "object",
        "properties": {
            "at": {"type": "string", "format": "date-time"},
            "user": {"type": "string", "format": "uuid"},
            "mail": {"type": ["string", "null"], "format": "email", "maxLength": 40},
            "amount": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1000},
        },
        "required": ["at", "user", "amount"],
    },
    {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"], "minProperties": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a"]}], "items": False, "minItems": 2},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "integer"}}, "required": ["t", "x"]},
            {"type": "object", "properties": {"t": {"const": "b"}, "y": {"type": "string"}}, "required": ["t", "y"]},
        ]
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "enum": [f"value {i}" for i in range(1000)]},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": -50},
    *({"type": "string", "format": one} for one in FORMATS),
    *({"type": "string", "pattern": one} for one in PATTERNS),
]

_small = {"type": "integer", "minimum": 0, "maximum": 4}


def _leaf(kind: str, *required: str, **keywords: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of this type, their keywords drawn from schemas of their own."""
    values = {name: from_schema(one) for name, one in keywords.items()}
    always = {"type": st.just(kind), **{name: values.pop(name) for name in required}}
    return st.fixed_dictionaries(always, optional=values)


_leaves = st.one_of(
    _leaf("string", minLength=_small, maxLength={"type": "integer", "minimum": 4, "maximum": 9}),
    _leaf("string", "format", format={"enum": FORMATS}),
    _leaf("string", "pattern", pattern={"enum": PATTERNS}),
    _leaf("integer", minimum={"type": "integer", "minimum": -50, "maximum": 0}, maximum={"enum": [1, 9, 10**6]}),
    _leaf("number", exclusiveMinimum={"type": "integer", "minimum": -9, "maximum": 9}),
    _leaf("number", "multipleOf", multipleOf={"enum": [0.5, 0.01, 3]}, minimum={"enum": [-5, 0, 2.5]}),
    _leaf("boolean"),
    _leaf("null"),
)


@st.composite
def _objects(draw: st.DrawFn, below: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), below, max_size=5))
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if draw(st.booleans()):
        found["required"] = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    if draw(st.booleans()):
        found["additionalProperties"] = draw(st.one_of(st.booleans(), below))
    return found


def _arrays(below: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    sizes = {"minItems": st.integers(0, 3), "maxItems": st.integers(3, 5)}
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": below}, optional=sizes),
        st.fixed_dictionaries(
            {"type": st.just("array"), "prefixItems": st.lists(below, min_size=1, max_size=3), "items": st.just(False)}
        ),
    )


def _deeper(below: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    any_of = st.fixed_dictionaries({"anyOf": st.lists(below, min_size=1, max_size=3)})
    return st.one_of(_objects(below), _objects(below), _arrays(below), any_of)


_enums = st.fixed_dictionaries(
    {"enum": st.lists(st.sampled_from(["a", "b\n", "é", 1, 2.5, None, True, [1], {"k": "v"}]), min_size=1, max_size=4)}
)
drawn: st.SearchStrategy[dict[str, Any]] = st.recursive(st.one_of(_enums, _leaves), _deeper, max_leaves=8)
