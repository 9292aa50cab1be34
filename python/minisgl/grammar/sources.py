"""Grammar sources: what clients send to constrain an output, one value of one kind, and its field.

Invariants: a request has one source; two equal ones count as one, two different ones are an error that names both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from minisgl.grammar.bounds import MAX_BYTES
from minisgl.sampling_params import ParamError

Kind = Literal["json_schema", "regex", "choice", "grammar"]
ANY_OBJECT = {"type": "object"}
"""Schema for `json_object`."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A client's grammar. `value`: a JSON schema as an object, a boolean or JSON text; a regular expression; a list of
    texts; a grammar in Lark or llama.cpp's GBNF."""

    kind: Kind
    value: Any
    field: str  # the client's field, for errors
    whitespace: str | None = None  # pattern of whitespace between JSON tokens; empty: none
    strict: bool = False  # enforce or refuse every schema keyword
    left_out: tuple[str, ...] = ()  # fields of a checked schema that are not enforced

    def asks_the_same(self, other: GrammarSource) -> bool:
        return self._meaning() == other._meaning()

    def _meaning(self) -> object:
        value = self.value
        if self.kind == "json_schema" and isinstance(value, str) and len(value) <= MAX_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        return self.kind, value, self.whitespace


def the_one(found: Sequence[GrammarSource]) -> GrammarSource | None:
    """Return the single source of a request, `None` if it has none. Raises `ParamError` for two different ones."""
    for other in found[1:]:
        if not other.asks_the_same(found[0]):
            reason = f"give one of {found[0].field} and {other.field}: an answer has one form"
            raise ParamError(other.field, other.value, reason)
    return replace(found[0], strict=any(one.strict for one in found)) if found else None
