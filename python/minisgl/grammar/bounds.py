"""Size limits of grammar sources, checked before the grammar library sees them. Compilation cannot be cancelled. The
library has its own limits, on counts and not on time, and check.py sets them low; this module covers the rest: the
automaton of a `multipleOf` has as many states as its digits say, and the engine pays for the whole rest of a literal at
each of its tokens.

Invariants: an error names the path; no limit depends on the machine or its load.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pydantic_core

from minisgl.sampling_params import ParamError

MAX_BYTES = 1 << 16  # bytes of a source
MAX_DEPTH = 128  # nesting of a schema's objects and lists
MAX_TEXT_BYTES = 4096  # bytes of one literal text
MAX_MULTIPLE = 10_000  # product of all multipleOf, without powers of ten
MAX_PLACES = 15  # decimal places of a multipleOf
# of Lark as the library reads it: texts, expressions and comments, in which nothing else begins; then what is looked at
_LEXEME = re.compile(
    r'"(?:\\.|[^"\\\n])*+"|//[^\n]*+|\#[^\n]*+|/(?:\\.|[^/\\])++/'
    r"|(%json|%llguidance)|(<\[[^<>\s]*+>)|(\btemperature\s*+=)|(&|~(?!\s*+\d))"
)
_SPACES = re.compile(r"\s*+")
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_decoder = json.JSONDecoder()


def check_size(text: str, field: str, most: int = MAX_BYTES) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ParamError(field, text, "must be valid Unicode, without lone surrogates") from None
    if size > most:
        raise ParamError(field, text, f"must have at most {most} bytes, not {size}")


def checked_choice(texts: list[str], field: str) -> list[str]:
    if not texts:
        raise ParamError(field, texts, "must not be empty")
    for i, text in enumerate(texts):
        check_size(text, f"{field}.{i}", MAX_TEXT_BYTES)
    check_size("".join(texts), field)
    return texts


def checked_lark(text: str, field: str, served: Callable[[Any], Any] = lambda schema: schema) -> str:
    """Check a Lark grammar and return it. Embedded schemas have the usual limits, and no library options; `served`
    rewrites each. Raises `ParamError` for grammar-wide options, tokens named by id, and the operators `A & B` and `~A`:
    to find whether those match anything, the library searches all their states, for minutes."""
    pieces, at = list[str](), 0
    while match := _LEXEME.search(text, at):
        pieces.append(text[at : match.end()])
        at = match.end()
        if match[1]:  # %json or %llguidance
            try:
                value, at = _decoder.raw_decode(text, _SPACES.match(text, at).end())  # type: ignore[union-attr]
            except (ValueError, RecursionError):
                raise ParamError(field, match[1], "must be followed by JSON") from None
            if match[1] == "%json":
                pieces.append(" " + json.dumps(served(checked_schema(value, field)), allow_nan=False))
            elif value != {}:
                raise ParamError(field, value, "%llguidance options are not allowed")
            else:
                pieces.append(" {}")
        elif match[2]:
            raise ParamError(field, match[2], "tokens cannot be named by id")
        elif match[3]:
            raise ParamError(field, match[3], "a temperature cannot be set in a grammar")
        elif match[4]:
            raise ParamError(
                field, text[match.start() :][:40], "the operators & and ~ are not allowed: their cost has no limit"
            )
    return "".join([*pieces, text[at:]])


def checked_schema(value: Any, field: str) -> dict[str, Any] | bool:
    """Check a schema (object, boolean or JSON text) and return it without library options. Raises `ParamError`."""
    if isinstance(value, str):
        check_size(value, field)
        try:
            value = pydantic_core.from_json(value)
        except ValueError as error:
            raise ParamError(field, value, f"not valid JSON: {error}") from None
    if not isinstance(value, (dict, bool)):
        raise ParamError(field, value, "must be a JSON schema: an object")
    if isinstance(value, bool):
        return value
    schema = {name: one for name, one in value.items() if name != "x-guidance"}
    size = 0
    for path, name, one in walk(schema):
        if len(path) > MAX_DEPTH:
            raise ParamError(field, value, f"must be nested at most {MAX_DEPTH} levels deep")
        for spelled in (name, one):
            if isinstance(spelled, str):
                check_size(spelled, ".".join([field, *path[:-1]]), MAX_TEXT_BYTES)
                size += len(spelled)
        size += 1
        if size > MAX_BYTES:  # before writing it as JSON, which would block the interpreter
            raise ParamError(field, value, f"must have at most {MAX_BYTES} bytes")
    try:
        check_size(json.dumps(schema, allow_nan=False, ensure_ascii=False), field)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ParamError):
            raise
        raise ParamError(field, value, f"not a JSON schema: {error}") from None
    return schema


def walk(value: Any) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield the path, the name and the value of every entry of every object and list in `value`, parents first."""
    todo: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while todo:
        path, value = todo.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        below = [((*path, str(name)), str(name), one) for name, one in items]
        yield from below
        todo.extend((at, one) for at, _, one in reversed(below) if isinstance(one, (dict, list)))


def num_states(multiple: float) -> int:
    """Return the number of states of an automaton for the multiples of a number; a power of ten adds none."""
    digits = "".join(map(str, Decimal(str(multiple)).as_tuple().digits)).strip("0")
    return int(digits or "1")


def has_too_many_digits(multiple: float) -> bool:
    """Return whether the library cannot represent a `multipleOf`: it has 32 bits, and few decimal places."""
    exponent = Decimal(str(multiple)).normalize().as_tuple().exponent
    num_places = max(0, -int(exponent))
    return num_places > MAX_PLACES or Decimal(str(multiple)).scaleb(num_places) >= 1 << 32


def combines(schema: Any) -> bool:
    """Return whether a schema may apply several subschemas to one value."""
    return any(name in _COMBINING for _, name, _ in walk(schema))


def are_too_many(states: Sequence[int], combined: bool) -> bool:
    """Return whether multiples with these state counts are too many together. `combined`: two may apply to one value,
    which needs the states of their least common multiple."""
    return sum(states) > MAX_MULTIPLE or (combined and math.lcm(*states) > MAX_MULTIPLE)


def check_multiples(schema: Any, field: str) -> None:
    states: list[int] = []
    combined = combines(schema)
    for path, name, one in walk(schema):
        if name != "multipleOf" or isinstance(one, bool) or not isinstance(one, (int, float)) or one <= 0:
            continue
        states.append(num_states(one))
        if are_too_many(states, combined):
            at = ".".join([field, *path])
            raise ParamError(at, one, f"all multipleOf of a schema must have at most {MAX_MULTIPLE} states together")
