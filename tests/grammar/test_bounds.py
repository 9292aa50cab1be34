"""Hostile sources: each is answered or refused, in no time that anybody would notice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from minisgl.grammar.bounds import MAX_BYTES, MAX_DEPTH, MAX_TEXT_BYTES, check_multiples, checked_lark, checked_schema
from minisgl.grammar.check import grammar_of
from minisgl.grammar.sources import GrammarSource, Kind
from minisgl.sampling_params import ParamError
from tests.helpers.grammar import accepts
from tests.helpers.seconds import computes_within


def nested(levels: int, within: str = "items") -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {within: found if within == "items" else [found]}
    return found


def each(count: int, value: Any) -> dict[str, Any]:
    return {"properties": {f"p{i}": value(i) if callable(value) else value for i in range(count)}}


def doubled(count: int, how: str) -> dict[str, Any]:
    """Each definition names the next one twice."""
    definitions: dict[str, Any] = {
        f"d{i}": {how: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)
    }
    return {"$defs": {**definitions, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def alternatives(rows: int, columns: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [each(1, {"const": [i, j]}) for j in range(columns)]} for i in range(rows)]}


def conditions(levels: int, keyword: str) -> dict[str, Any]:
    found: dict[str, Any] = {"const": "x"}
    for _ in range(levels):
        found = {keyword: found, "minLength": 1, "then": {"maxLength": 9}, "else": {"properties": {"a": {"const": 1}}}}
    return found


SCHEMAS: dict[str, Any] = {
    "deep": nested(60),
    "deeper": nested(1000),
    "deep text": '{"items":' * 7000 + "{}" + "}" * 7000,
    "deep anyOf": nested(60, "anyOf"),
    "minLength": {"type": "string", "minLength": 10**9},
    "maxLength": {"type": "string", "maxLength": 10**18},
    "minItems": {"type": "array", "items": {"type": "string"}, "minItems": 10**9, "maxItems": 2 * 10**9},
    "maxItems": {"type": "array", "maxItems": 10**18, "items": {"type": "array", "maxItems": 10**18}},
    "minProperties": {"type": "object", "minProperties": 10**9},
    "a million times": {"type": "string", "pattern": "^a{1000000}$"},
    "a hundred times, four times": {"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}$"},
    "catastrophe": {"type": "string", "pattern": "^(a+)+$"},
    "exponential automaton": {"type": "string", "pattern": "(a|b)*a(a|b){500}"},
    "letters": {"type": "string", "pattern": "^(\\p{L}{1,1000}\\w{1,1000})+$"},
    "multiple": {"type": "integer", "multipleOf": 999983},
    "small multiple": {"type": "number", "multipleOf": 1.00007},
    "two multiples": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    "two by reference": {"$defs": {"a": {"multipleOf": 9973}}, "$ref": "#/$defs/a", "multipleOf": 9967},
    "many multiples": each(700, lambda i: {"multipleOf": 90 + i}),
    "wide range": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "precise range": {"type": "number", "minimum": 1.23456789012345e-300, "maximum": 1e300},
    "loop": {"$ref": "#"},
    "longer loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "loop with a way out": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
    "remote": {"$ref": "http://localhost:1/x"},
    "file": {"$ref": "file:///etc/hosts"},
    "texts": {"enum": [f"v{i}" for i in range(6000)]},
    "numbers": {"enum": list(range(100_000))},
    "one long text": {"const": "x" * 60_000},
    "long texts": {"enum": [str(i) * 4000 for i in range(10)]},
    "many names": each(1500, {"type": "string"}),
    "many patterns": each(1000, lambda i: {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"}),
    "many required": {"type": "object", "required": [f"r{i}" for i in range(5000)]},
    "pattern properties": {"patternProperties": {f"^.*p{i}.*$": {"type": "integer"} for i in range(200)}},
    "many alternatives": {"anyOf": [each(5, {"enum": [i]}) for i in range(300)]},
    "product": alternatives(30, 2),
    "larger product": alternatives(10, 10),
    "intersection": {"allOf": [{"type": "string", "pattern": f"^.*{one}.*$"} for one in "abcdefghijklmnopqrst"]},
    "doubled allOf": doubled(30, "allOf"),
    "doubled anyOf": doubled(30, "anyOf"),
    "formats": each(500, lambda i: {"type": "string", "format": "date-time", "maxLength": 20 + i}),
    "impossible": {"allOf": [{"type": "string", "format": "email"}, {"format": "uri"}]},
    "ranges": each(500, lambda i: {"type": "number", "minimum": i * 1.000123, "maximum": i * 1e6 + 0.123456789}),
    "oneOf of overlapping ones": {"oneOf": [each(3, {"minimum": i}) for i in range(300)]},
    "oneOf of tagged ones": {"oneOf": [{**each(1, {"const": i}), "required": ["p0"]} for i in range(1000)]},
    "doubled oneOf": doubled(30, "oneOf"),
    "nested not": conditions(100, "not"),
    "nested if": conditions(60, "if"),
    "nested contains": conditions(100, "contains"),
    "many dependencies": {**each(500, {}), "dependentRequired": {f"p{i}": ["p0", f"q{i}"] for i in range(500)}},
    "ifs in all": {"allOf": [{"if": each(1, {"const": i}), "then": {"required": [f"r{i}"]}} for i in range(100)]},
    "set of many": {"type": "array", "items": {"enum": list(range(3000))}, "uniqueItems": True},
    "names of patterns": {**each(500, {}), "patternProperties": {f"^p{i}$": {} for i in range(300)}},
    "names that are patterns": {"propertyNames": {"pattern": "^((a?){30}){30}$"}, **each(300, {})},
    "without look-ahead": {"type": "string", "pattern": "^" + "(?!a)" * 5000 + "((" * 2000},
    "many anchors": {
        "$defs": {f"d{i}": {"$anchor": f"x{i}", "$ref": f"#x{i + 1}"} for i in range(1000)},
        "$ref": "#x0",
    },
    "unevaluated": {
        "allOf": [{"anyOf": [each(1, {}), each(2, {})]} for _ in range(50)],
        "unevaluatedProperties": False,
    },
    "NUL": {"type": "object", "properties": {"a\0b": {"const": "x\0y"}}, "required": ["a\0b"]},
    "odd characters": each(1, {"enum": ["\u2028", "\uffff", "\U0001f600\u202e"]}),
    "surrogate": {"const": "\ud800"},
    "surrogate of JSON": '{"const": "\\ud800"}',
    "options": {"x-guidance": {"lenient": True}, "items": {"x-guidance": {"lenient": True}, "not": {}}},
    "no schema": {"type": 5, "properties": [], "enum": {}, "required": "a", "items": 3},
}
OTHERS: list[tuple[Kind, Any]] = [
    ("regex", "(a{1000}){1000}"),
    ("regex", "a" * 70_000),
    ("regex", "(" * 30_000 + ")" * 30_000),
    ("regex", "(?i)" + "straße|" * 5000),
    ("choice", [f"{i}" * 10 for i in range(10_000)]),
    ("choice", ["x" * 5000]),
    ("grammar", "start: A\nA: B{100000000}\nB: /a/"),
    ("grammar", "start: a{1000000000}\na: /x/ a?"),
    ("grammar", "start: s\ns: s s | /a/ | "),
    ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("grammar", "root ::= root root | root"),
    ("grammar", 'start: %json {"multipleOf": 999983}'),
    ("grammar", "start: A\nA: " + " & ".join(f"/.*{one}.*/" for one in "abcdefghijklmnop")),
    (
        "grammar",
        "start: "
        + " | ".join(f"r{i}" for i in range(2000))
        + "\n"
        + "\n".join(f'r{i}: "a{i}" r{i} | "b"' for i in range(2000)),
    ),
]


def outcome(kind: Kind, value: Any) -> str:
    try:
        grammar_of(GrammarSource(kind, value, "f"))
    except ParamError as error:
        assert error.field.startswith("f") and error.reason and len(str(error)) < 700
        return "refused"
    return "taken"


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_is_taken_or_refused_at_once(name: str) -> None:
    began = time.thread_time()
    outcome("json_schema", SCHEMAS[name])
    assert computes_within(time.thread_time() - began, 2.0)


@pytest.mark.parametrize(("kind", "value"), OTHERS, ids=lambda one: str(one)[:20])
def test_hostile_sources_of_other_kinds_are_decided_at_once(kind: Kind, value: Any) -> None:
    began = time.thread_time()
    outcome(kind, value)
    assert computes_within(time.thread_time() - began, 2.0)


def test_all_of_them_take_little_memory_and_print_nothing() -> None:
    text = (
        "import resource\n"
        "from tests.grammar.test_bounds import OTHERS, SCHEMAS, outcome\n"
        "outcome('regex', 'a')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = [outcome('json_schema', one) for one in SCHEMAS.values()] + [outcome(*one) for one in OTHERS]\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, set(found))\n"
    )
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    mib, kinds = run.stdout.split(maxsplit=1)
    assert int(mib) < 100 and "taken" in kinds and "refused" in kinds
    assert run.stderr == ""


# ------------------------------------------------------------------------------------------------------------- places


def test_sources_just_within_a_bound_pass_and_just_beyond_fail() -> None:
    checked_schema(nested(MAX_DEPTH - 1), "f")
    with pytest.raises(ParamError, match="nested at most"):
        checked_schema(nested(MAX_DEPTH), "f")
    checked_schema({"const": "é" * (MAX_TEXT_BYTES // 2)}, "f")
    with pytest.raises(ParamError, match=r"^f: must have at most 4096 bytes"):
        checked_schema({"const": "é" * (MAX_TEXT_BYTES // 2) + "x"}, "f")
    rest = MAX_BYTES - len(json.dumps({"enum": [""] * 16})) + 1
    texts = ["x" * (rest // 16)] * 16
    assert len(json.dumps({"enum": texts})) <= MAX_BYTES
    checked_schema({"enum": texts}, "f")
    with pytest.raises(ParamError, match="65536 bytes"):
        checked_schema({"enum": [*texts, "x" * 16]}, "f")


@pytest.mark.parametrize("value", [0.01, 0.1, 0.5, 1, 5, 100, 1000, 100_000, 1e6, 9973, 0, -3, True, "x", None])
def test_usual_multiples_are_within_bounds(value: object) -> None:
    check_multiples({"properties": {"a": {"multipleOf": value}}}, "f")


def test_multiples_count_together_where_they_may_meet() -> None:
    apart = each(5, lambda i: {"multipleOf": (97, 89, 83, 79, 73)[i]})
    check_multiples(apart, "f")
    with pytest.raises(ParamError, match=r"^f\.properties\.p2\.multipleOf"):
        check_multiples({**apart, "allOf": []}, "f")


def test_schemas_in_a_grammar_have_the_same_bounds() -> None:
    def left_out(grammar: str) -> tuple[str, ...]:
        return grammar_of(GrammarSource("grammar", grammar, "f")).left_out

    assert left_out('start: %json {"multipleOf": 7} "x" %json\n{}') == ()
    assert left_out('start: %json {} | %json { "items": {"multipleOf": 10007}}') == ("f.items.multipleOf",)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "options"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "options"),
        ("%llguidance 7\nstart: /a/", "options"),
        ("%llguidance\nstart: /a/", "followed by JSON"),
        ("start: <[7]>", "named by id"),
        ("start: <[^7]> // a comment", "named by id"),
        ('start: "\\"" <[*]> "\\""', "named by id"),
        ("start: A\nA[temperature=2]: /a/", "temperature"),
        ("start: a\na[max_tokens=3, temperature = 0.5]: /a+/", "temperature"),
        ("start: A\nA: /a+/ & ~/aa/", "has no limit"),
        ("start: ~ B\nB: /aa/", "has no limit"),
        (
            "start: T\nT: /((\\w.*b){2,})*((\\w.*b){2,})*/ & /" + "([a-y]|\\w|(?i:straße)){0,100000}" * 20 + "/",
            "no limit",
        ),
    ],
)
def test_grammars_with_forbidden_constructs_are_refused(grammar: str, words: str) -> None:
    with pytest.raises(ParamError, match=words):
        grammar_of(GrammarSource("grammar", grammar, "f"))


@pytest.mark.parametrize(
    "grammar",
    [
        '%llguidance {}\nstart: "a"',
        'start: "<[7]>" /<[8]>\\/<[9]>/ // <[10]> temperature=3 %llguidance {"a": 1}\n',
        'start: "temperature=3" # <[7]>\n',
        "start: a b\na[max_tokens=3]: /x+/\nb[stop=/z/, capture]: /y+/",
        "start: a\na[lazy]: /x+y/",
        "%import common.INT\nstart: INT",
        "start: <|im_end|>",
        "start: A\nA: /a&~+/ /b/~2..3 // a & ~b",
    ],
)
def test_grammars_with_allowed_constructs_are_accepted(grammar: str) -> None:
    assert checked_lark(grammar, "f") == grammar
    assert outcome("grammar", grammar) == "taken"


def test_a_schema_in_a_grammar_cannot_turn_the_checks_off() -> None:
    grammar = 'start: %json {"x-guidance": {"whitespace_pattern": ".*"}, "const": [1]}'
    assert accepts(grammar_of(GrammarSource("grammar", grammar, "f")).text, "[1]")
    assert not accepts(grammar_of(GrammarSource("grammar", grammar, "f")).text, "[x1]")
