"""Structured output for the offline API: `SamplingParams(grammar=structured_outputs(json=schema))`.

Invariants: the checks and errors are those of the server.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from minisgl.grammar.check import grammar_of
from minisgl.grammar.sources import ANY_OBJECT, GrammarSource, Kind, the_one


def structured_outputs(
    *,
    json: dict[str, Any] | str | type | None = None,
    json_object: bool = False,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    whitespace_pattern: str | None = None,
) -> str:
    """Return a grammar for `SamplingParams`. Give one of: a JSON schema (an object, its text or a pydantic model), any
    JSON object, a regular expression, a list of texts, a grammar in Lark or llama.cpp's GBNF. `whitespace_pattern` is
    the pattern of whitespace between JSON tokens (empty: none). Warns about schema keywords that are not enforced.
    Raises `ParamError`."""
    if isinstance(json, type):
        json = json.model_json_schema()  # type: ignore[attr-defined]
    given: list[tuple[str, Kind, Any]] = [
        ("json", "json_schema", json),
        ("json_object", "json_schema", ANY_OBJECT if json_object else None),
        ("regex", "regex", regex),
        ("choice", "choice", None if choice is None else list(choice)),
        ("grammar", "grammar", grammar),
    ]
    sources = [
        GrammarSource(kind, value, name, whitespace_pattern if kind == "json_schema" else None)
        for name, kind, value in given
        if value is not None
    ]
    if (source := the_one(sources)) is None:
        raise TypeError("structured_outputs: give one of json, json_object, regex, choice and grammar")
    made = grammar_of(source)
    if made.left_out:
        warnings.warn(f"structured_outputs: not enforced: {', '.join(made.named())}", stacklevel=2)
    return made.text
