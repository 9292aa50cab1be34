"""Writes grammar sources in llguidance's dialect of Lark; each becomes a piece that can be part of a larger rule.

Invariants: no client text can end the literal, expression or schema that contains it; JSON output has at most 32
consecutive whitespace characters, so that it does not end in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.grammar.sources import GrammarSource

WHITESPACE = "[ \\n\\t]{1,32}"
_BACKSLASH_PAIR_OR_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_BREAKS = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a grammar rule. `body` fits anywhere in a rule, on one line; `grammars` are those that it refers to."""

    body: str
    grammars: tuple[dict[str, Any], ...] = ()


def piece(source: GrammarSource, name: str = "asked") -> Piece:
    """Return the piece for a checked source (see check.py). `name`: for a grammar of its own, if it needs one."""
    match source.kind:
        case "json_schema":
            return Piece(schema(source.value, source.whitespace))
        case "regex":
            return Piece(regex(source.value))
        case "choice":
            return Piece("(" + " | ".join(literal(text) for text in source.value) + ")")
        case "grammar":
            return Piece(f"@{name}", ({"name": name, "lark_grammar": source.value},))


def literal(text: str) -> str:
    """Return a rule for exactly this text."""
    return json.dumps(text)


def regex(pattern: str) -> str:
    """Return a rule for a match of the whole expression, in the syntax of Rust's regex crate."""
    return "/" + _BACKSLASH_PAIR_OR_SLASH.sub(lambda found: _BREAKS.get(found[0], found[0]), pattern) + "/"


def schema(value: dict[str, Any] | bool, whitespace: str | None = None) -> str:
    """Return a rule for JSON text that fits the schema."""
    inside = {"allOf": [value]} if isinstance(value, bool) else value
    if whitespace == "":
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
    return "%json " + json.dumps({**inside, "x-guidance": options}, allow_nan=False)


def grammar(rules: str | Piece, others: Sequence[Piece] = ()) -> str:
    """Return a grammar for `SamplingParams.grammar`. `rules` is Lark with a rule `start` that may use `others`, or a
    piece that is the whole grammar."""
    if isinstance(rules, Piece):
        return grammar(f"start: {rules.body}", [rules])
    named = [one for other in others for one in other.grammars]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *named]})
