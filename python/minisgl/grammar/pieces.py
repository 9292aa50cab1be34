"""Writes sources as grammars in llguidance's dialect of Lark: each is a piece that can stand in a rule of a larger one.

Invariants: no text of a client can end the literal, the expression or the schema that it stands in; JSON has at most 32
characters of whitespace in one place, so that an answer does not end in them.
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
    """`body` stands anywhere in a rule, on one line; the grammars that it names stand beside that of the rule."""

    body: str
    grammars: tuple[dict[str, Any], ...] = ()


def piece(source: GrammarSource, name: str = "asked") -> Piece:
    """`source.value` is checked (see check.py). `name`: free for a grammar of its own, if it needs one."""
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
    """Exactly this text."""
    return json.dumps(text)


def regex(pattern: str) -> str:
    """A match of the whole expression, in the syntax of Rust's regex crate."""
    return "/" + _BACKSLASH_PAIR_OR_SLASH.sub(lambda found: _BREAKS.get(found[0], found[0]), pattern) + "/"


def schema(value: dict[str, Any] | bool, whitespace: str | None = None) -> str:
    """A JSON text that the schema accepts."""
    inside = {"allOf": [value]} if isinstance(value, bool) else value
    if whitespace == "":
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}
    return "%json " + json.dumps({**inside, "x-guidance": options}, allow_nan=False)


def grammar(rules: str | Piece, others: Sequence[Piece] = ()) -> str:
    """Return a grammar as `SamplingParams.grammar` takes it. `rules`: Lark with a rule `start`, in whose rules the
    `others` stand; or a piece that is all of it."""
    if isinstance(rules, Piece):
        return grammar(f"start: {rules.body}", [rules])
    named = [one for other in others for one in other.grammars]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *named]})
