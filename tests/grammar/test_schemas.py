"""What of a schema is obeyed, left out with its name, or refused; and that nothing else is ever accepted."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema.validators import validator_for

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE
from minisgl.grammar import pieces
from minisgl.grammar.check import Made, taken
from minisgl.grammar.slots import Matcher
from minisgl.grammar.sources import GrammarSource
from minisgl.sampling_params import ParamError
from tests.helpers.grammar import accepts
from tests.helpers.grammars import matcher

_SPACE = frozenset(b" \n\t\r")
_USUAL = frozenset(b"abcdefgXYZ0123456789-_.:@/ ")
_ENDS = b'}]"n'  # null ends what could go on
SOFT, HARD = 150, 1500  # bytes after which an answer is led to its end, and given up


@dataclass
class Drawn:
    """`wrong`: answers that do not fit, with what is wrong. `dead`: beginnings after which nothing can come."""

    left_out: tuple[str, ...]
    num_whole: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


def source(schema: Any, strict: bool = False) -> GrammarSource:
    return GrammarSource("json_schema", schema, "f", strict=strict)


def answers(schema: Any, num_walks: int, seed: str) -> Drawn:
    """Draw answers to a schema. Raises `ParamError` if it is refused."""
    found = taken(source(schema))
    start = matcher(pieces.grammar(pieces.piece(found)))
    drawn, rng = Drawn(found.left_out), random.Random(seed)
    asked = without(schema, found.left_out)
    kind = jsonschema.Draft7Validator if '"items": [' in json.dumps(asked) else jsonschema.Draft202012Validator
    validator = validator_for(asked, default=kind)(asked, format_checker=kind.FORMAT_CHECKER)
    for _ in range(num_walks):
        text, is_dead = walk(start.copy(), rng)
        if is_dead:
            drawn.dead.append(text or "")
        elif text is not None:
            drawn.num_whole += 1
            error = next(iter(validator.iter_errors(json.loads(text))), None)
            if error is not None:
                drawn.wrong.append((text, f"{error.message} at {list(error.absolute_schema_path)}"))
    return drawn


def walk(made: Matcher, rng: random.Random) -> tuple[str | None, bool]:
    """Return an answer, None for one too long; or the beginning of one, and True, if only white space can come."""
    text = bytearray()
    while len(text) < HARD:
        may = _allowed(made)
        if EOS_ID in may and (len(may) == 1 or len(text) > SOFT or rng.random() < 0.5):
            return text.decode(), False
        some = [one for one in may if one != EOS_ID and one not in _SPACE]
        if not some:
            return text.decode(errors="replace"), EOS_ID not in may
        text.append(_next(some, len(text) > SOFT, rng))
        made.consume(text[-1])
    return None, False


def _next(some: list[int], to_end: bool, rng: random.Random) -> int:
    if len(some) > 40:  # a text
        if ord('"') in some and (to_end or rng.random() < 0.3):
            return ord('"')
        return rng.choice([one for one in some if one in _USUAL] or some) if rng.random() < 0.9 else rng.choice(some)
    ends = [one for one in _ENDS if one in some] if to_end else []
    return ends[0] if ends else rng.choice(some)


def _allowed(made: Matcher) -> list[int]:
    mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    made.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def without(schema: Any, places: tuple[str, ...]) -> Any:
    """Return `schema` without these keywords, without nulls, and without patterns that Python does not read."""
    found = copy.deepcopy(schema)
    for place in sorted(places, key=len, reverse=True):
        *path, name = place.split(".")[1:]
        one = found
        for part in path:
            one = one[int(part)] if isinstance(one, list) else one.get(part, {})
        if name == "oneOf":
            one["anyOf"] = one.pop("oneOf")
        one.pop(name, None)
        for other in ("minContains", "maxContains") if name == "contains" else ():
            one.pop(other, None)
    todo = [found]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            for name, value in list(one.items()):
                is_unread = name == "pattern" and re.search(r"\\p|\\u\{|\(\?<[a-z]", str(value))
                if is_unread or (value is None and name != "const"):
                    del one[name]
        todo += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return found


# ------------------------------------------------------------------------------------------------------ random schemas

NAMES = ("a", "b", "c", "k_1")
LEAVES: tuple[Any, ...] = (
    *(True, {"type": "string"}, {"const": "x"}, {"type": "integer"}, {"enum": ["p", "q"]}, {"type": "boolean"}),
)
VALUES: tuple[Any, ...] = ("a", "b", "xy", 0, 1, 2, 1.5, True, False, None, [], {}, ["a"], {"a": 1})
KEY_SCHEMAS: tuple[Any, ...] = (
    *(True, {}, False, {"type": "string"}, {"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"maxLength": 1}),
    *({"minLength": 2}, {"const": "k_1"}, {"format": "uuid"}, {"anyOf": [{"const": "a"}, {"pattern": "^x+$"}]}),
    *({"pattern": "^k_1$"},),
)
JUNK: tuple[Any, ...] = (None, 5, "x", [], {}, [[1]], {"a": 5}, -1, 2.0, True)
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


class Random:
    """Schemas with every keyword, in every order."""

    def __init__(self, seed: int, junk: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.junk = junk  # how often a keyword has any value

    def root(self) -> dict[str, Any]:
        found = self.schema(3)
        chain = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/B"}}}
        definitions = {"A": self.schema(1), "B": {**chain, "required": ["n"]}}
        whole = {**(found if isinstance(found, dict) else {"allOf": [found]}), "$defs": definitions}
        return dict(json.loads(json.dumps(whole)))  # as from a client: no part is in two places

    def schema(self, depth: int) -> Any:
        rng, draw = self.rng, self.rng.random
        if draw() < 0.06:
            return rng.choice([True, False, {}])
        kinds = [rng.choice(TYPES)] if draw() < 0.8 else rng.sample(TYPES, 2)
        found: dict[str, Any] = {} if draw() < 0.1 else {"type": kinds[0] if len(kinds) == 1 else kinds}
        below = [self.below(depth) for _ in range(14)]
        rare: list[tuple[float, dict[str, Any]]] = []
        if "object" in kinds or "type" not in found:
            rare += [
                (0.8, {"properties": {name: self.below(depth) for name in rng.sample(NAMES, rng.randint(1, 3))}}),
                (0.5, {"required": rng.sample(NAMES, rng.randint(1, 2))}),
                (0.3, {"additionalProperties": rng.choice([False, True, {"type": "integer"}])}),
                (0.15, {"patternProperties": {rng.choice(["^k_1$", "^(a|b)$", "^x", "b$", "^", "^a?$"]): below[0]}}),
                (0.1, {"minProperties": rng.randint(0, 3)}),
                (0.1, {"maxProperties": rng.randint(0, 3)}),
                (0.15, {"propertyNames": rng.choice(KEY_SCHEMAS)}),
                (0.12, {"dependentRequired": {rng.choice(NAMES): rng.sample(NAMES, rng.randint(0, 2))}}),
                (0.08, {"dependentSchemas": {rng.choice(NAMES): below[1]}}),
                (0.1, {"unevaluatedProperties": rng.choice([False, True, {"type": "string"}])}),
            ]
        if "array" in kinds or "type" not in found:
            rare += [
                (0.6, {"items": below[2]}),
                (0.25, {"prefixItems": below[3 : 3 + rng.randint(1, 2)]}),
                (0.3, {"minItems": rng.randint(0, 3)}),
                (0.3, {"maxItems": rng.randint(0, 4)}),
                (0.2, {"uniqueItems": draw() < 0.7}),
                (0.15, {"contains": below[5]}),
                (0.1, {"contains": below[5], "minContains": rng.randint(0, 2), "maxContains": rng.randint(0, 2)}),
                (0.1, {"unevaluatedItems": draw() < 0.5}),
            ]
        if "string" in kinds or "type" not in found:
            patterns = ["^a", "b$", "^[ab]+$", "^(?!a)[abc]*$", "\\bx", "^(?=b).*$", "x|y"]
            rare += [
                (0.3, {"minLength": rng.randint(0, 4)}),
                (0.3, {"maxLength": rng.randint(0, 6)}),
                (0.2, {"pattern": rng.choice(patterns)}),
                (0.15, {"format": rng.choice(["date", "date-time", "uuid", "password", "time", "ipv4", "int32"])}),
            ]
        if {"integer", "number"} & {*kinds} or "type" not in found:
            rare += [
                (0.3, {"minimum": rng.choice([0, 1, -5, 2.5])}),
                (0.3, {"maximum": rng.choice([0, 10, 7, 2.5])}),
                (0.1, {"exclusiveMinimum": rng.randint(-2, 3), "exclusiveMaximum": rng.randint(0, 9)}),
                (0.15, {"multipleOf": rng.choice([1, 2, 5, 3])}),
            ]
        conditions = [below[6], {"properties": {rng.choice(NAMES): {"const": "p"}}, "required": [rng.choice(NAMES)]}]
        rare += [
            (0.08, {"enum": [rng.choice(VALUES) for _ in range(rng.randint(1, 4))]}),
            (0.04, {"const": rng.choice(VALUES)}),
            (0.12, {"not": rng.choice([below[7], {"required": [rng.choice(NAMES)]}, {"enum": ["a", 1]}])}),
            (0.1, {"anyOf": below[8 : 8 + rng.randint(1, 3)]}),
            (0.12, {"oneOf": below[9 : 9 + rng.randint(1, 3)]}),
            (0.08, {"allOf": below[10 : 10 + rng.randint(1, 2)]}),
            (0.08, {"if": rng.choice(conditions), "then": below[12], "else": below[13]}),
            (0.04, {"$ref": rng.choice(["#/$defs/A", "#/$defs/B"])}),
        ]
        for chance, keywords in rare:
            if draw() < chance:
                found |= keywords
        for name in found:
            if draw() < self.junk:
                found[name] = rng.choice(JUNK)
        keys = list(found)
        rng.shuffle(keys)
        return {name: found[name] for name in keys}

    def below(self, depth: int) -> Any:
        return self.schema(depth - 1) if depth > 0 and self.rng.random() < 0.5 else self.rng.choice(LEAVES)


# --------------------------------------------------------------------------------------------------------------- tests

CORPUS: dict[str, Any] = json.loads((Path(__file__).parent / "corpus.json").read_text())
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": NUMBER, "b": TEXT}}
MAP = {"type": "object", "additionalProperties": NUMBER}
LIST = {"type": "array", "items": TEXT}

NOTHING: list[Any] = [
    {**LIST, "uniqueItems": False},
    {**LIST, "uniqueItems": True, "maxItems": 1},
    {**LIST, "contains": NUMBER, "minContains": 0},
    {**LIST, "minContains": 3},
    {**MAP, "propertyNames": {}},
    {**MAP, "propertyNames": True},
    {**MAP, "propertyNames": TEXT},
    {**MAP, "propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"type": "string", "title": "Key"}}},
    {**OBJECT, "dependentRequired": {}},
    {**OBJECT, "dependentRequired": {"a": []}},
    {**OBJECT, "dependentSchemas": {"a": True}},
    {**OBJECT, "dependencies": {}},
    {**OBJECT, "patternProperties": {}},
    {**OBJECT, "unevaluatedProperties": True},
    {**OBJECT, "unevaluatedProperties": {}},
    {**OBJECT, "minProperties": 0, "maxProperties": 9},
    {**OBJECT, "required": ["a"], "minProperties": 1},
    {**OBJECT, "if": {"required": ["a"]}},
    {**OBJECT, "then": False},
    {**OBJECT, "not": False},
    {**OBJECT, "required": None, "description": None, "additionalProperties": None, "enum": None},
    {**OBJECT, "$schema": "https://example.com/dialect", "$vocabulary": {}, "$dynamicAnchor": "node"},
    {**OBJECT, "deprecated": True, "nullable": True, "discriminator": {"propertyName": "a"}, "contentSchema": {}},
    {**TEXT, "minLength": 2.0, "maxLength": 5.0},
    {"$dynamicRef": "#node", "$defs": {"n": {"$dynamicAnchor": "node", "type": "string"}}},
    {"$recursiveAnchor": True, "type": "object", "properties": {"next": {"$recursiveRef": "#"}}},
    {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {**OBJECT, "uniqueItems": False}}}},
    {"$id": "https://example.com/a", "$ref": "https://example.com/a#/$defs/x", "$defs": {"x": TEXT}},
    {"type": "object", "properties": {"a": {"oneOf": [TEXT, NUMBER]}, "b": {"$ref": "#/properties/a/oneOf/1"}}},
]


@pytest.mark.parametrize("schema", NOTHING, ids=lambda one: json.dumps(one)[-60:])
def test_keywords_without_effect_are_accepted_silently(schema: Any) -> None:
    assert taken(source(schema, strict=True)).left_out == ()


OBEYED: list[tuple[Any, list[Any], list[Any]]] = [
    ({**OBJECT, "properties": {**OBJECT["properties"], "c": {"not": {}}}}, [{"a": 1}], [{"c": 1}]),
    ({**TEXT, "not": {"enum": ["a", "bc"]}}, ["", "b", "bcd", "x"], ["a", "bc"]),
    ({"not": {"type": "null"}}, [1, "x", []], [None]),
    ({"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
    ({**OBJECT, "not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": ""}], [{"a": 1, "b": ""}]),
    ({"anyOf": [TEXT, NUMBER], "not": {"not": {"const": 1}}}, [1], [2, "1"]),
    ({**MAP, "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}, {}], [{"A": 1}, {"ab": "x"}]),
    ({**MAP, "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1, "y": 2}], [{"z": 1}]),
    ({**MAP, "propertyNames": {"maxLength": 2, "minLength": 1}}, [{"x": 1}], [{"xyz": 1}, {"": 1}]),
    ({**MAP, "propertyNames": {"format": "date"}}, [{"2024-02-29": 1}], [{"2023-02-29": 1}, {"x": 1}]),
    ({**MAP, "propertyNames": False}, [{}], [{"x": 1}]),
    ({**OBJECT, "propertyNames": {"const": "a"}}, [{"a": 1}], [{"a": 1, "b": ""}, {"b": ""}]),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, [{}, {"b": ""}, {"a": 1, "b": ""}], [{"a": 1}]),
    (
        {**OBJECT, "dependencies": {"a": ["b"], "b": {"required": ["a"]}}},
        [{}, {"a": 1, "b": ""}],
        [{"a": 1}, {"b": ""}],
    ),
    (
        {**OBJECT, "if": {"properties": {"b": {"const": "x"}}, "required": ["b"]}, "then": {"required": ["a"]}},
        [{}, {"a": 1}, {"b": "y"}, {"a": 1, "b": "x"}],
        [{"b": "x"}],
    ),
    ({"if": TEXT, "then": {"maxLength": 1}, "else": {"enum": [1, None]}}, ["x", 1, None], ["xy", 2]),
    ({**OBJECT, "minProperties": 1}, [{"a": 1}, {"a": 1, "b": ""}], [{}]),
    ({**OBJECT, "maxProperties": 1}, [{"a": 1}, {"b": ""}, {}], [{"a": 1, "b": ""}]),
    ({**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": ""}], [{}, {"a": 1, "b": ""}]),
    ({"oneOf": [{**TEXT, "maxLength": 3}, {**TEXT, "minLength": 2}]}, ["a", "abcd"], ["abc"]),
    ({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": TEXT, "y": NUMBER}}, ["a", 1], [None]),
    ({**LIST, "contains": {"const": "k"}}, [["k"], ["k", "x"]], [[], ["x"]]),
    ({**LIST, "contains": {"const": "k"}, "maxContains": 1}, [["k"], ["k", "x"]], [["k", "k"], ["x"]]),
    ({"type": "array", "items": {"enum": ["p", "q"]}, "uniqueItems": True}, [["q", "p"], []], [["p", "p"]]),
    ({"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False}, [["x"], []], [["x", 1]]),
    (
        {"allOf": [OBJECT, {"properties": {"c": NUMBER}}], "unevaluatedProperties": False},
        [{"a": 1, "c": 2}],
        [{"a": 1, "d": 2}],
    ),
    (
        {
            **OBJECT,
            "anyOf": [{"properties": {"c": NUMBER}}, {"properties": {"d": TEXT}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1, "c": 2}, {"a": 1, "d": ""}],
        [{"a": 1, "e": 2}],
    ),
    (
        {"$ref": "#/$defs/x", "properties": {"c": NUMBER}, "required": ["c"], "$defs": {"x": OBJECT}},
        [{"a": 1, "c": 2}],
        [{"a": 1}],
    ),
    ({**TEXT, "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]*@$"}, ["a.b@", "@"], [".a@", "a..b@"]),
    ({**TEXT, "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ["1", "-0.5", "1."], ["", "-", "."]),
    ({**TEXT, "pattern": "^(?=.{1,3}$)[a-z]+$"}, ["abc"], ["abcd", ""]),
    ({**TEXT, "format": "date-time"}, ["2024-02-29T23:59:59Z"], ["2023-02-29T23:59:59Z", "2024-02-29T23:59:60Z"]),
    ({**NUMBER, "maximum": 2**63 - 1}, [1, 2**62], [2**63, 2**63 - 1]),
    ({"type": "number", "minimum": -3.5e38, "maximum": 3.5e38}, [1, -2.5], ["x"]),
    ({**NUMBER, "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 2**62], [2**63, -(2**63) - 1, 1.5]),
    ({**NUMBER, "minimum": -(2**63)}, [0, -(2**62)], [-(2**64)]),
    ({**NUMBER, "minimum": 10**18}, [10**18, 2**62], [10**18 - 1, 0, -(10**18)]),
    ({**NUMBER, "exclusiveMaximum": -1e18}, [-(2**62)], [-(10**18), 0]),
    ({"type": "number", "minimum": 0, "maximum": 2**64}, [0.5, 2**62], [-1]),
    ({**NUMBER, "multipleOf": 1e-9, "minimum": -(2**63)}, [5, -3], [0.5]),
    ({"enum": [2**60 + 1, 3]}, [3], [2**60]),
]


@pytest.mark.parametrize(("schema", "yes", "no"), OBEYED, ids=lambda one: json.dumps(one)[-60:])
def test_unsupported_keywords_are_rewritten(schema: Any, yes: list[Any], no: list[Any]) -> None:
    grammar = pieces.grammar(pieces.piece(taken(source(schema))))
    for value in (*yes, *no):
        assert accepts(grammar, json.dumps(value)) is (value in yes), value


LEFT_OUT: list[tuple[Any, list[str]]] = [
    ({**LIST, "uniqueItems": True}, ["uniqueItems"]),
    ({"$defs": {"x": {**LIST, "uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}}, ["$defs.x.uniqueItems"]),
    ({"oneOf": [NUMBER, {"type": "number"}]}, ["oneOf"]),
    ({"oneOf": [{"required": ["a"], "properties": {"a": {"pattern": "x"}}}, TEXT]}, ["oneOf"]),
    ({"oneOf": [{**LIST, "uniqueItems": True}, NUMBER]}, ["oneOf.0.uniqueItems"]),
    ({**OBJECT, "if": TEXT, "then": {"items": {"uniqueItems": True}}}, ["then.items.uniqueItems"]),
    ({**TEXT, "pattern": "a(?=b)"}, ["pattern"]),
    ({**TEXT, "pattern": "\\bx"}, ["pattern"]),
    ({"properties": {"a": {**TEXT, "pattern": "(.)\\1"}, "b": {**TEXT, "pattern": "x"}}}, ["properties.a.pattern"]),
    ({"type": "object", "patternProperties": {"^a": TEXT, "b$": NUMBER}}, ["patternProperties"]),
    ({"type": "object", "patternProperties": {"b^a": TEXT, "^x": NUMBER}}, ["patternProperties"]),
    ({"type": "object", "minProperties": 3}, ["minProperties"]),
    ({**OBJECT, "additionalProperties": True, "maxProperties": 3}, ["maxProperties"]),
    ({**MAP, "propertyNames": {"minLength": 2, "pattern": "a"}}, ["propertyNames"]),
    ({**LIST, "contains": {"pattern": "x"}, "maxContains": 2}, ["contains"]),
    ({**TEXT, "not": {"pattern": "x"}}, ["not"]),
    ({"if": {"pattern": "x"}, "then": TEXT}, ["if"]),
    ({"$dynamicRef": "#nowhere"}, ["$dynamicRef"]),
    ({"properties": {"n": {**NUMBER, "multipleOf": 10**18}}}, ["properties.n.multipleOf"]),
    ({**NUMBER, "multipleOf": 999983}, ["multipleOf"]),
    ({"type": "number", "multipleOf": 1e-300}, ["multipleOf"]),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, ["allOf.1.multipleOf"]),
    ({**NUMBER, "multipleOf": 100_000, "minimum": -(2**63), "maximum": 2**63 - 1}, ["multipleOf"]),
    ({**NUMBER, "minimum": 2**63}, ["minimum"]),
    ({"type": "number", "maximum": -1e300}, ["maximum"]),
]


@pytest.mark.parametrize(("schema", "places"), LEFT_OUT, ids=lambda one: json.dumps(one)[-60:])
def test_keywords_that_cannot_be_enforced_are_named_or_refused_under_strict(schema: Any, places: list[str]) -> None:
    assert taken(source(schema)).left_out == tuple(f"f.{place}" for place in places)
    with pytest.raises(ParamError, match="`strict` leaves no keyword out") as refused:
        taken(source(schema, strict=True))
    assert refused.value.field == f"f.{places[0]}"


@pytest.mark.parametrize(
    "name", ["int64-date", "password", "byte", "uri-reference", "regex", "decimal", "int32", "uuid4"]
)
@pytest.mark.parametrize("kind", ["string", "integer"])
def test_a_format_that_is_not_known_is_left_out_and_named(name: str, kind: str) -> None:
    for strict in (False, True):
        found = taken(source({"anyOf": [{}, {"type": kind, "format": name}]}, strict))
        assert found.left_out == ("f.anyOf.1.format",)


FORMS: list[tuple[Any, str]] = [
    ({"properties": {"a": {"required": True}}}, "f.properties.a.required"),
    ({"items": 3}, "f.items"),
    ({"oneOf": {}}, "f.oneOf"),
    ({"anyOf": [{}, 5]}, "f.anyOf.1"),
    ({"minLength": -1}, "f.minLength"),
    ({"maximum": "3"}, "f.maximum"),
    ({"dependentRequired": {"a": "b"}}, "f.dependentRequired.a"),
    ({"$ref": "#/x", "x": {"uniqueItems": 1}}, "f.x.uniqueItems"),
]


@pytest.mark.parametrize(("schema", "field"), FORMS)
def test_a_keyword_of_a_wrong_type_is_named(schema: Any, field: str) -> None:
    with pytest.raises(ParamError, match="must be") as refused:
        taken(source(schema))
    assert refused.value.field == field


ENDS: list[Any] = [
    {**OBJECT, "properties": {"k_1": TEXT}, "required": ["k_1"], "patternProperties": {"^k_1$": TEXT}},
    {**OBJECT, "patternProperties": {"^(a|b)$": {"maxLength": 1}}},
    {**OBJECT, "patternProperties": {"^[ab]{1}$": {}}},
    {**OBJECT, "patternProperties": {"^[^\\s\\S]$": {}}},
    {**OBJECT, "propertyNames": {"pattern": "^a$"}},
    {"allOf": [{"properties": {"a": NUMBER}}, {"type": "object", "patternProperties": {"^a$": {}}}]},
]


@pytest.mark.parametrize("schema", ENDS, ids=lambda one: json.dumps(one)[-60:])
def test_no_comma_stands_where_no_name_can_follow(schema: Any) -> None:
    asked = json.loads(json.dumps(schema))
    (asked["allOf"][1] if "allOf" in asked else asked)["additionalProperties"] = False
    found = answers(asked, 12, "ends")
    assert not found.dead and not found.wrong and found.num_whole == 12


def test_names_for_a_header_are_few_and_harmless() -> None:
    made = Made(
        "", tuple(f"f.properties.{name}.format" for name in ("a", "x\r\nset-cookie: y", "é,", *map(str, range(99))))
    )
    named = made.named()
    assert len(named) == 17 and named[-1].endswith(" more")
    assert named[1] == "f.properties.x__set-cookie:_y.format" and named[2] == "f.properties.__.format"


# ------------------------------------------------------------------------------------------- what generators write


def drawn(name: str, num_walks: int) -> tuple[str, ...]:
    found = answers(CORPUS[name], num_walks, name)
    assert not found.wrong and not found.dead, name
    return found.left_out


def test_what_generators_write_is_served_and_obeyed() -> None:
    """All 200; what is left out are formats, sets of anything, and a pattern or two."""
    assert len(CORPUS) == 200
    keywords = {place.rsplit(".", 1)[1] for name in CORPUS for place in drawn(name, 1)}
    assert keywords <= {"format", "uniqueItems", "pattern"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_what_generators_write_is_obeyed_in_many_answers(name: str, times: int) -> None:
    drawn(name, 10 * times)


@pytest.mark.parametrize("junk", [0.0, 0.02])
def test_random_schemas_are_obeyed_or_refused(junk: float) -> None:
    fuzz(range(60), junk)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("junk", [0.0, 0.02])
def test_many_random_schemas_are_obeyed_or_refused(part: int, junk: float, times: int) -> None:
    fuzz(range(1000 + 100 * part * times, 1000 + 100 * (part + 1) * times), junk)


def fuzz(seeds: range, junk: float) -> None:
    num_served = 0
    for seed in seeds:
        schema = Random(seed, junk).root()
        try:
            found = answers(schema, 3, str(seed))
        except ParamError as refused:
            assert "coerce" not in str(refused) and refused.field.startswith("f")
            continue
        except RecursionError:  # jsonschema's, of a schema that is itself
            continue
        num_served += 1
        assert not found.wrong and not found.dead, (seed, schema)
    assert num_served > len(seeds) // 3
