"""Sources as Lark: exactly what was asked for, whatever characters it is made of, alone and within a larger grammar."""

from __future__ import annotations

import json

import pytest

from minisgl.grammar.check import checked
from minisgl.grammar.pieces import Piece, grammar, literal, piece
from minisgl.grammar.sources import GrammarSource, Kind
from tests.helpers.grammar import accepts


def spelled(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


ODD = [
    "a",
    "",
    'quote " and \\ backslash',
    "a/b//c # d",
    "line\nline\r\ttab",
    "\x00\x01",
    "é \u2028 \uffff \U0001f600",
    '" | "b',
    '"\nstart: /.*/\n',
    "%json {}",
    "<think> @g {{}} // x",
    "\\u0041 \\n",
]


def made(kind: Kind, value: object) -> Piece:
    return piece(checked(GrammarSource(kind, value, "f")))


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_a_literal_is_that_text_and_no_other(text: str) -> None:
    found = grammar(f"start: {literal(text)}")
    assert accepts(found, text)
    assert not accepts(found, text + "x") and not accepts(found, "b" + text)


def test_choices_are_these_texts() -> None:
    found = grammar(made("choice", ODD))
    assert all(accepts(found, text) for text in ODD)
    assert not any(accepts(found, text) for text in ("ab", "b", "A", "line", "x" * 10))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("abc", "abc", "abcd"),
        ("^abc$", "abc", "^abc$"),
        ("a/b", "a/b", "a\\/b"),
        ("a\\/b", "a/b", "ab"),
        ("a\\\\/b", "a\\/b", "a/b"),
        ("a\nb", "a\nb", "ab"),
        ("a\\\nb", "a\nb", "ab"),
        ("[/]+//", "///", "/x/"),
        ("(?i)yes|no", "NO", "maybe"),
        ("\\d{3}-\\w+", "123-é", "12-x"),
        ("a # b // c", "a # b // c", "a "),
        ("/\nstart: /.*", "/\nstart: /xx", "other"),
    ],
)
def test_an_expression_matches_all_of_the_text(pattern: str, yes: str, no: str) -> None:
    found = grammar(made("regex", pattern))
    assert accepts(found, yes) and not accepts(found, no)


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_a_schema_s_texts_stay_inside_of_it(text: str) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {text: {"const": text}}}
    found = grammar(made("json_schema", {**schema, "type": "object", "required": [text]}))
    assert accepts(found, spelled({text: text}))
    assert not accepts(found, spelled({text: text + "x"})) and not accepts(found, "{}")


def test_json_has_little_whitespace_in_one_place() -> None:
    found = grammar(made("json_schema", {"type": "array", "items": {"type": "integer"}}))
    assert accepts(found, "[1,2]") and accepts(found, "[ 1,\n\t2 ]") and accepts(found, "[" + 32 * " " + "1]")
    assert not accepts(found, "[" + 33 * " " + "1]") and not accepts(found, " [1]") and not accepts(found, "[1] ")


def test_whitespace_of_the_client_s_choice() -> None:
    def made(whitespace: str) -> str:
        return grammar(piece(GrammarSource("json_schema", {"type": "array"}, "f", whitespace)))

    assert accepts(made(""), "[1,2]") and not accepts(made(""), "[1, 2]")
    assert accepts(made(" {0,1}"), "[1, 2]") and not accepts(made(" {0,1}"), "[1,  2]")


@pytest.mark.parametrize(
    ("kind", "value", "yes", "no"),
    [
        ("json_schema", {"type": "integer"}, "12", "x"),
        ("json_schema", True, "[]", "x"),
        ("regex", "a|b", "b", "ab"),
        ("choice", ["a", "b"], "b", "ab"),
        ("grammar", "start: A | B\nA: /a+/\nB: /b+/", "aa", "ab"),
        ("grammar", 'root ::= "a" [0-9]+', "a12", "a"),
    ],
)
def test_a_piece_stands_alone_and_in_a_rule(kind: Kind, value: object, yes: str, no: str) -> None:
    one = made(kind, value)
    assert accepts(grammar(one), yes) and not accepts(grammar(one), no)
    larger = grammar(f'start: "<" ({one.body} | "none") ">"', [one])
    assert accepts(larger, f"<{yes}>") and accepts(larger, "<none>")
    assert not accepts(larger, f"<{no}>") and not accepts(larger, yes)


def test_two_grammars_of_clients_stand_in_one() -> None:
    a, b = (
        piece(checked(GrammarSource("grammar", f"start: X\nX: /{letter}+/", "f")), name)
        for letter, name in (("x", "first"), ("y", "second"))
    )
    found = grammar(f'start: {a.body} "," {b.body}', [a, b])
    assert accepts(found, "xx,yy") and not accepts(found, "xx,xx")
