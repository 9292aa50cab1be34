"""Turns a client's grammar source into a grammar, or into an error that says what is wrong and where. Compilation
cannot be cancelled, so limits come first, then the library: it parses the grammar and starts an output with it, on an
alphabet of bytes. The engine compiles it again with its own vocabulary.

Invariants: what the library does not support is rewritten (schemas.py), left out and reported, or refused; no client
input disables the library's checks; any input is answered within two seconds.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from minisgl.extension import HOW_TO_BUILD, NEEDS, _rust, why_missing
from minisgl.grammar import pieces
from minisgl.grammar.bounds import check_multiples, check_size, checked_choice, checked_lark, checked_schema
from minisgl.grammar.schemas import WHOLE, keywords, served
from minisgl.grammar.sources import GrammarSource
from minisgl.sampling_params import ParamError
from minisgl.utils.installed import how_to_get, missing

MAX_REASON_CHARS = 400
# of the library's own million: the expressions of a grammar then take less than 0.1 s and few megabytes
LEXER_FUEL = 100_000
NUM_STEPS = 32  # tokens of the test output
_BEGINS = b'{["'  # the bytes that lead deepest into JSON
_REFUSALS = (
    ("[Ll]ook-?(?:around|ahead|behind)|[Bb]ackreference|regex parse error|determine if regex is empty", ("pattern",)),
    ("patternProperty regexes", ("patternProperties",)),
    ("min/maxProperties only", ("minProperties", "maxProperties")),
    ("circular references with sibling", ("$ref",)),
    ("too many expressions", ("multipleOf",)),
)
"""(pattern of the library's error, refused keywords) for keywords that can be left out."""
MAX_NAMED = 16  # fields in a header
MAX_NAME = 160  # characters of a field
MAX_KNOWN = 4096  # cached results, about a megabyte
MAX_KEPT_CHARS = 1000
_known: OrderedDict[bytes, str] = OrderedDict()  # digest of a grammar -> its error, empty if it is valid
_lock = threading.Lock()
_IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class Made:
    """A checked grammar: `text` is for `SamplingParams.grammar`, `left_out` are schema fields that are not enforced."""

    text: str
    left_out: tuple[str, ...] = ()

    def named(self) -> tuple[str, ...]:
        """Return the fields of `left_out` for an HTTP header: a limited number, without special characters."""
        fields = (re.sub(r"[^!-+\--~]", "_", one)[:MAX_NAME] for one in self.left_out)
        names = list(dict.fromkeys(fields))
        return (*names[:MAX_NAMED], *([f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else ()))


def grammar_of(source: GrammarSource) -> Made:
    """Return the grammar of `source`. Takes up to seconds. Raises `ParamError`."""
    accepted = taken(source)
    return Made(pieces.grammar(pieces.piece(accepted)), accepted.left_out)


def checked(source: GrammarSource, without: Mapping[str, frozenset[str]] | None = None) -> GrammarSource:
    """Return `source` within the limits and in the form that `pieces.piece` takes: a schema as an object, a grammar in
    Lark. `without`: keywords that the library refused. Raises `ParamError`."""
    value, left_out = source.value, list[str]()

    def served_schema(given: Any) -> Any:
        rewritten = served(given, source.field, source.strict, _is_empty, without)
        left_out.extend(f"{source.field}.{place}" for place in rewritten.left_out)
        check_multiples(rewritten.schema, source.field)
        return rewritten.schema

    match source.kind:
        case "json_schema":
            value = served_schema(checked_schema(value, source.field))
        case "choice":
            value = checked_choice(value, source.field)
        case "regex":
            check_size(value, source.field)
        case "grammar":
            check_size(value, source.field)
            value = checked_lark(_as_lark(value, source.field), source.field, served_schema)
    return replace(source, value=value, left_out=tuple(left_out))


def taken(source: GrammarSource) -> GrammarSource:
    """Return `source` checked and accepted by the library: without the keywords that it refuses, unless `strict`
    requires them. Takes up to seconds. Raises `ParamError`."""
    without = dict[str, frozenset[str]]()
    while True:
        candidate = checked(source, without)
        grammar = pieces.grammar(pieces.piece(candidate))
        if why_missing() or not (reason := _reason(grammar)):
            validate(grammar, source.field, source.value)
            return candidate
        refused = _refused(reason, candidate.value) if source.kind == "json_schema" else {}
        more = {name: without.get(name, frozenset()) | values for name, values in refused.items()}
        if all(without.get(name) == values for name, values in more.items()):
            validate(grammar, source.field, source.value)
        without |= more


def _refused(reason: str, schema: Any) -> dict[str, frozenset[str]]:
    """Return the keywords for which the library refuses a schema, with their values, if they can be left out."""
    for words, names in _REFUSALS:
        if not re.search(words, reason):
            continue
        if names != ("pattern",):
            return dict.fromkeys(names, frozenset((WHOLE,)))
        patterns = {value for name, value in keywords(schema) if name == "pattern" and isinstance(value, str)}
        patterns |= {
            key
            for name, value in keywords(schema)
            if name == "patternProperties" and isinstance(value, dict)
            for key in value
        }
        bad = frozenset(one for one in patterns if _reason(_grammar_of({"type": "string", "pattern": one})))
        return dict.fromkeys(("pattern", "patternProperties"), bad) if bad else {"pattern": frozenset((WHOLE,))}
    return {}


def _grammar_of(schema: Any) -> str:
    return pieces.grammar(pieces.Piece(pieces.schema(schema)))


def _is_empty(schema: Any) -> bool:
    """Return whether a schema of strings matches no value."""
    return not why_missing() and bool(re.search("Unsatisfiable|is empty", _reason(_grammar_of(schema))))


def validate(grammar: str, field: str, value: object = None) -> None:
    """Raise `ParamError` if the library refuses the grammar. `value` is the client's `field`, for the error."""
    if why_missing():
        raise ParamError(field, value, f"the compiler of grammars {NEEDS}: {HOW_TO_BUILD}", "unsupported_value")
    if reason := _reason(grammar):
        raise ParamError(field, value, _PLACE.sub("", reason)[:MAX_REASON_CHARS])


def _reason(grammar: str) -> str:
    """Return why the library refuses the grammar; empty if it accepts it. Results are cached by digest."""
    key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
    with _lock:
        if (cached := _known.get(key)) is not None:
            _known.move_to_end(key)
            return cached
    reason = _found(grammar)
    if len(reason) <= MAX_KEPT_CHARS:
        with _lock:
            _known[key] = reason
            if len(_known) > MAX_KNOWN:
                _known.popitem(last=False)
    return reason


def _found(grammar: str) -> str:
    return _brief(_rust.check_grammar(grammar, LEXER_FUEL, NUM_STEPS, _BEGINS))


def _brief(text: str) -> str:
    """Shorten an error of the library to one line, without the grammar itself."""
    head = text.split("\n   1 |", 1)[0].split("<non-verbose/>", 1)[0].strip()
    if head == "NoExtensionBias":
        head = "no value can satisfy it"
    if found := re.search(r"row has (\d+) items; max is (\d+)", head):
        head = (
            f"too many alternatives at one position, as with many optional properties: {found[1]}, at most {found[2]}"
        )
    return " ".join(head.split())


def _as_lark(text: str, field: str) -> str:
    """Return a grammar in Lark or llama.cpp's GBNF as Lark. Raises `ParamError`."""
    if _IS_LARK.search(text):
        return text
    if missing("llguidance"):
        raise ParamError(field, text, f"GBNF needs a package that is not installed on the server: {how_to_get('gbnf')}")
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        raise ParamError(field, text, f"must be Lark or GBNF: {reason}") from None
