"""What clients write to say how an answer must look: one value of one kind, and the field it came in.

Sources as grammars in llguidance's dialect of Lark: each is a piece that can stand in a rule of a larger one.

Invariants: a request has one source; two that ask for the same are one, two that differ are an error that names both.
No text of a client can end the literal, the expression or the schema that it stands in; JSON has at most 32 characters
of whitespace in one place, so that an answer does not end in them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from minisgl.grammar.bounds import MAX_BYTES
from minisgl.sampling_params import ParamError

Kind = Literal["json_schema", "regex", "choice", "grammar"]
ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """`value`: a JSON schema as an object, a boolean or JSON text; a regular expression; a list of texts; a grammar in
    Lark's or llama.cpp's notation."""

    kind: Kind
    value: Any
    field: str  # as the client wrote it
    whitespace: str | None = None  # of JSON, between tokens: a regular expression; empty: none
    strict: bool = False  # every keyword of a schema is obeyed, or refused
    left_out: tuple[str, ...] = ()  # of a checked one: fields of keywords that an answer need not obey

    def asks_the_same(self, other: GrammarSource) -> bool:
        return self._meaning() == other._meaning()

    def _meaning(self) -> object:
        value = self.value
        if self.kind == "json_schema" and isinstance(value, str) and len(value) <= MAX_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        return self.kind, value, self.whitespace


def the_one(found: Sequence[GrammarSource]) -> GrammarSource | None:
    """The one source of all that a request gives. Raises `ParamError`."""
    for other in found[1:]:
        if not other.asks_the_same(found[0]):
            reason = f"give one of {found[0].field} and {other.field}: an answer has one form"
            raise ParamError(other.field, other.value, reason)
    return replace(found[0], strict=any(one.strict for one in found)) if found else None


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
    """As `SamplingParams.grammar` has it. `rules`: Lark with a rule `start`, in whose rules the `others` stand; or a
    piece that is all of it."""
    if isinstance(rules, Piece):
        return grammar(f"start: {rules.body}", [rules])
    named = [one for other in others for one in other.grammars]
    return json.dumps({"grammars": [{"lark_grammar": rules}, *named]})
