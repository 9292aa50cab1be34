"""From what a client wrote to a grammar, or to an error that says what is wrong with it and where.

Compiling cannot be cancelled, so bounds come first, then the library: it reads the grammar and begins an answer with
it, on an alphabet of bytes. The engine compiles once more, with its own vocabulary.

Schemas without the properties that nobody named: whoever reads the answer takes no others, and a small model goes on
with an object that may go on.

Invariants: what the library cannot do is refused, never ignored; nothing of a client turns the library's checks off;
whatever is sent, the answer comes within two seconds. What fits the closed schema fits the given one; where closing
could leave nothing that fits, it stays as is.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minisgl.extension import HOW_TO_BUILD, NEEDS, _rust, why_missing
from minisgl.grammar import sources
from minisgl.grammar.bounds import check_size, checked_choice, checked_lark, checked_schema, walk
from minisgl.grammar.sources import GrammarSource
from minisgl.sampling_params import ParamError

# beside these it is not the properties alone that say what an object may have
_MORE = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *(
            "dependentSchemas",
            "dependentRequired",
            "dependencies",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "$ref",
            "$dynamicRef",
        ),
    )
)
_OF_NAMES = ("properties", "$defs", "definitions")
_OF_LISTS = ("prefixItems", "anyOf", "oneOf")


def closed(schema: Any) -> Any:
    """With `additionalProperties` false at each object that names its properties."""
    return _closed(schema) if isinstance(schema, Mapping) and not _has_all_of(schema) else schema


def _has_all_of(schema: Any) -> bool:
    """Then an object may be described in several places."""
    if isinstance(schema, Mapping):
        return "allOf" in schema or any(_has_all_of(one) for one in schema.values())
    return isinstance(schema, list) and any(_has_all_of(one) for one in schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _OF_NAMES:
        if isinstance(given := schema.get(name), Mapping):
            found[name] = {key: _closed(one) for key, one in given.items()}
    if isinstance(schema.get("items"), Mapping):
        found["items"] = _closed(schema["items"])
    for name in _OF_LISTS:
        if isinstance(given := schema.get(name), list) and "properties" not in schema:
            found[name] = [_closed(one) for one in given]
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and properties and not _MORE & schema.keys():
        required = schema.get("required", [])
        if isinstance(required, list) and all(name in properties for name in required):
            found["additionalProperties"] = False
    return found


MAX_REASON_CHARS = 400
# of the library's own million: the expressions of a grammar then take less than 0.1 s and few megabytes
LEXER_FUEL = 100_000
NUM_STEPS = 32  # of an answer that is begun
_BEGINS = b'{["'  # these lead deepest into JSON
# whose entries are names, no keywords
_NAMED_BY_CLIENTS = {("properties",), ("patternProperties",), ("$defs",), ("definitions",)}
MAX_KNOWN = 4096  # grammars: about a megabyte
MAX_KEPT_CHARS = 1000
_known: OrderedDict[bytes, str] = OrderedDict()  # digest of a grammar -> why it is none; empty: it is one
_lock = threading.Lock()
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")


def grammar_of(source: GrammarSource) -> str:
    """As `SamplingParams.grammar` has it. Takes up to seconds. Raises `ParamError`."""
    checked_one = checked(source)
    found = sources.grammar(sources.piece(checked_one))
    validate(found, source.field, checked_one.value)
    return found


def checked(source: GrammarSource) -> GrammarSource:
    """Within bounds, with a value that `sources.piece` takes: a schema as an object, a grammar in Lark's notation.
    Raises `ParamError`."""
    value = source.value
    match source.kind:
        case "json_schema":
            value = closed(checked_schema(value, source.field))
        case "choice":
            value = checked_choice(value, source.field)
        case "regex":
            check_size(value, source.field)
        case "grammar":
            check_size(value, source.field)
            value = checked_lark(_as_lark(value, source.field), source.field)
    return replace(source, value=value)


def validate(grammar: str, field: str, value: object = None) -> None:
    """Whether the library takes it. `value`: what the client wrote in `field`, for the error. Raises `ParamError`."""
    if why_missing():
        raise ParamError(field, value, f"the compiler of grammars {NEEDS}: {HOW_TO_BUILD}", "unsupported_value")
    if reason := _reason(grammar):
        at = _place(value, reason)
        raise ParamError(f"{field}{at}", value, _PLACE.sub("", reason)[:MAX_REASON_CHARS])


def _reason(grammar: str) -> str:
    """Why not; empty if it does. Most grammars come again: what was found is kept, not the grammar."""
    key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
    with _lock:
        if (known := _known.get(key)) is not None:
            _known.move_to_end(key)
            return known
    found = _found(grammar)
    if len(found) <= MAX_KEPT_CHARS:
        with _lock:
            _known[key] = found
            if len(_known) > MAX_KNOWN:
                _known.popitem(last=False)
    return found


def _found(grammar: str) -> str:
    return _brief(_rust.check_grammar(grammar, LEXER_FUEL, NUM_STEPS, _BEGINS))


def _brief(text: str) -> str:
    """Without the grammar itself, on one line."""
    head = text.split("\n   1 |", 1)[0].split("<non-verbose/>", 1)[0].strip()
    if head == "NoExtensionBias":
        head = "nothing can satisfy it"
    if found := re.search(r"row has (\d+) items; max is (\d+)", head):
        head = f"too many ways to go on in one place, as many optional properties have: {found[1]}, at most {found[2]}"
    return " ".join(head.split())


def _place(value: object, reason: str) -> str:
    """Where in a schema the keyword is that the library speaks of, as far as that can be found."""
    keys, one_format = re.search(r"Unimplemented keys: (\[.*?\])", reason), re.search(r"Unknown format: (.*)", reason)
    if not isinstance(value, dict) or not (keys or one_format):
        return ""
    names = json.loads(keys[1]) if keys else ["format"]
    for path, name, found in walk(value):
        is_keyword = name in names and path[-2:-1] not in _NAMED_BY_CLIENTS
        if is_keyword and (one_format is None or found == one_format[1]):
            return "".join(f".{part}" for part in path)
    return ""


def _as_lark(text: str, field: str) -> str:
    """Clients send Lark or llama.cpp's GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        raise ParamError(field, text, f"neither Lark nor GBNF: {reason}") from None
