"""What clients write is a grammar or an error that says what is wrong and where."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import jsonschema
import pytest

from minisgl.grammar import check
from minisgl.grammar.check import grammar_of, taken
from minisgl.grammar.schemas import closed
from minisgl.grammar.sources import GrammarSource, Kind
from minisgl.sampling_params import ParamError
from tests.helpers.grammar import accepts


def refusal(kind: Kind, value: Any) -> ParamError:
    with pytest.raises(ParamError) as found:
        grammar_of(GrammarSource(kind, value, "f"))
    return found.value


@pytest.mark.parametrize(
    ("schema", "field", "words"),
    [
        ({"type": "foo"}, "f", "Invalid type: foo"),
        ({"$ref": "#/$defs/x"}, "f", "does not exist"),
        ({"$ref": "http://localhost/x"}, "f", "not present"),
        ({"$ref": "#"}, "f", "no value can satisfy it"),
        (False, "f", "schema is false"),
        ({"not": {}}, "f", "schema is false"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "f", "Unsatisfiable"),
        ({"enum": ["x" * 5_000]}, "f.enum", "at most 4096 bytes"),
        ({"enum": ["x" * 4_000] * 17}, "f", "at most 65536 bytes"),
        ([], "f", "must be a JSON schema"),
        ('{"type": "foo"}', "f", "Invalid type: foo"),
        ("{", "f", "not valid JSON"),
        ({"minimum": float("nan")}, "f", "not a JSON schema"),
    ],
)
def test_schema_errors_name_field_and_reason(schema: Any, field: str, words: str) -> None:
    error = refusal("json_schema", schema)
    assert error.field == field and words in error.reason and "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(?=a)", "look-around"),
        ("regex", "(", "unclosed group"),
        ("regex", "\ud800", "valid Unicode"),
        ("choice", [], "must not be empty"),
        ("grammar", "root = 5", "must be Lark or GBNF"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", 'root ::= "a', "must be Lark or GBNF"),
        ("grammar", "root ::= root", "no value can satisfy it"),
    ],
)
def test_errors_of_other_grammars_name_field_and_reason(kind: Kind, value: Any, words: str) -> None:
    error = refusal(kind, value)
    assert error.field == "f" and words in error.reason


def test_a_schema_cannot_turn_the_checks_off() -> None:
    options = {"lenient": True, "whitespace_pattern": ".*"}
    assert "look-around" in refusal("regex", "(?=a)").reason
    unique = {"x-guidance": options, "items": {"x-guidance": options, "uniqueItems": True}}
    with pytest.raises(ParamError, match=r"^f\.items\.uniqueItems"):
        taken(GrammarSource("json_schema", unique, "f", strict=True))
    found = grammar_of(GrammarSource("json_schema", {"x-guidance": options, "type": "array"}, "f")).text
    assert accepts(found, "[]") and not accepts(found, "[x]")
    named = {"properties": {"x-guidance": {"type": "integer"}}, "required": ["x-guidance"]}
    found = grammar_of(GrammarSource("json_schema", named, "f")).text
    assert accepts(found, '{"x-guidance":1}') and not accepts(found, "{}") and not accepts(found, '{"x-guidance":"a"}')


def test_accepted_and_refused_sources() -> None:
    """As it is read, or at the first bytes of an answer."""
    broken = ("start: /(/", "start: nothing", "start: start", '{"grammars": 3}', "", 'start: %json {"not": {}}')
    fine = ("start: /a+/", 'start: %json {"type": "object"}', 'start: <|no|> "a"')
    too_much = ("start: /" + "(a|b|ab)*" * 2000 + "/", "start: " + " | ".join(f'"{i}"' for i in range(2500)))
    for grammar in (*broken, *too_much):
        with pytest.raises(ParamError):
            check.validate(grammar, "f")
    for grammar in fine:
        check.validate(grammar, "f")


def test_a_grammar_is_checked_once_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it takes and of what it refuses; what was found for one is not found for another."""
    asked: list[str] = []
    found = check._found
    monkeypatch.setattr(check, "_found", lambda grammar: asked.append(grammar) or found(grammar))
    monkeypatch.setattr(check, "_known", OrderedDict())
    monkeypatch.setattr(check, "MAX_KNOWN", 3)
    good, bad = {"const": "once"}, {"items": {"$ref": "#/once"}}
    for _ in range(3):
        assert grammar_of(GrammarSource("json_schema", good, "f")) == grammar_of(
            GrammarSource("json_schema", good, "g")
        )
        assert str(refusal("json_schema", bad)).startswith("f: Pointer")
    assert len(asked) == 2
    for i in range(3):
        grammar_of(GrammarSource("regex", f"once{i}", "f"))
    assert len(asked) == 5
    grammar_of(GrammarSource("json_schema", good, "f"))
    assert len(asked) == 6, "the oldest are forgotten"


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
    {"allOf": [NAMED, {"properties": {"b": {}}, "required": ["b"]}]},
    {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
    {"$defs": {"n": NAMED}, "allOf": [{"$ref": "#/$defs/n"}, {"required": ["b"]}]},
    {"enum": [{"properties": {}}], "const": {"properties": {}}},
]


@pytest.mark.parametrize("schema", SAME)
def test_schemas_that_compose_objects_are_not_closed(schema: Any) -> None:
    assert closed(schema) == schema


def test_the_given_schema_is_not_changed() -> None:
    given = {"properties": {"x": dict(NAMED)}}
    closed(given)
    assert given == {"properties": {"x": NAMED}}


def test_values_that_fit_still_fit_the_closed_schema() -> None:
    for value, fits in (({"a": 1}, True), ({"a": 1, "b": 2}, False), ({}, False)):
        assert jsonschema.Draft202012Validator(closed(NAMED)).is_valid(value) is fits
        assert not fits or jsonschema.Draft202012Validator(NAMED).is_valid(value)


def test_answers_have_no_more_properties() -> None:
    """Unless the schema speaks of others."""
    opened = NAMED | {"additionalProperties": True}
    for schema, more in ((NAMED, False), (opened, True)):
        grammar = grammar_of(GrammarSource("json_schema", schema, "f")).text
        assert accepts(grammar, '{"a": 1}') and accepts(grammar, '{"a": 1, "b": 2}') is more


def test_gbnf_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParamError, match=r"GBNF needs a package .*gbnf"):
        grammar_of(GrammarSource("grammar", 'root ::= "a"', "grammar"))
    assert grammar_of(GrammarSource("grammar", 'start: "a"', "grammar")).text
