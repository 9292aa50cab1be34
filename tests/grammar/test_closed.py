"""Closed schemas: what fits them fits the given ones, and they are closed where that is safe."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from minisgl.grammar.check import grammar_of
from minisgl.grammar.closed import closed
from minisgl.grammar.sources import GrammarSource
from tests.helpers.grammar import accepts

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FALSE = {"additionalProperties": False}


def test_objects_that_name_their_properties_are_closed() -> None:
    assert closed(NAMED) == NAMED | FALSE
    nested = {"type": "object", "properties": {"x": NAMED, "y": {"type": "array", "items": NAMED}}}
    found = closed(nested)
    assert found["properties"]["x"] == NAMED | FALSE == found["properties"]["y"]["items"]
    either = {"anyOf": [NAMED, {"type": "null"}], "$defs": {"n": NAMED}}
    assert closed(either) == {"anyOf": [NAMED | FALSE, {"type": "null"}], "$defs": {"n": NAMED | FALSE}}


SAME: list[Any] = [
    True,
    {"type": "object"},
    {"type": "object", "properties": {}},
    NAMED | {"additionalProperties": {"type": "string"}},
    NAMED | {"patternProperties": {"^b": {}}},
    NAMED | {"required": ["a", "b"]},
    NAMED | {"minProperties": 2},
    {"allOf": [NAMED, {"properties": {"b": {}}, "required": ["b"]}]},
    {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
    {"$defs": {"n": NAMED}, "allOf": [{"$ref": "#/$defs/n"}, {"required": ["b"]}]},
    {"enum": [{"properties": {}}], "const": {"properties": {}}, "default": {"properties": {}}},
]


@pytest.mark.parametrize("schema", SAME)
def test_where_more_may_be_said_nothing_changes(schema: Any) -> None:
    assert closed(schema) == schema


def test_the_given_one_is_not_changed() -> None:
    given = {"properties": {"x": dict(NAMED)}}
    closed(given)
    assert given == {"properties": {"x": NAMED}}


def test_what_fits_still_fits() -> None:
    for value, fits in (({"a": 1}, True), ({"a": 1, "b": 2}, False), ({}, False)):
        assert jsonschema.Draft202012Validator(closed(NAMED)).is_valid(value) is fits
        assert not fits or jsonschema.Draft202012Validator(NAMED).is_valid(value)


def test_answers_have_no_more_properties() -> None:
    """Unless the schema speaks of others."""
    opened = NAMED | {"additionalProperties": True}
    for schema, more in ((NAMED, False), (opened, True)):
        grammar = grammar_of(GrammarSource("json_schema", schema, "f"))
        assert accepts(grammar, '{"a": 1}') and accepts(grammar, '{"a": 1, "b": 2}') is more
