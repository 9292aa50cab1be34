"""Checks the types of JSON schema keywords.

Invariants: null is valid for every keyword and has no effect; annotations are not checked; an error names the path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minisgl.grammar.logic import COUNTS, LEAST, MOST, Logic
from minisgl.sampling_params import ParamError


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (Mapping, bool))


_Form = tuple[Callable[[Any], bool], str]
_SCHEMA: _Form = (_is_schema, "a schema: an object or a boolean")
_SCHEMAS: _Form = (lambda value: isinstance(value, list), "a list of schemas")
_BY_NAME: _Form = (lambda value: isinstance(value, Mapping), "an object")
_TEXT: _Form = (lambda value: isinstance(value, str), "a text")
_BOUND: _Form = (_is_number, "a number")
_FORMS: dict[str, _Form] = {
    **dict.fromkeys(COUNTS, (_is_count, "an integer of at least 0")),
    **dict.fromkeys((*LEAST[:1], *MOST[:1], "multipleOf"), _BOUND),
    **dict.fromkeys((*LEAST[1:], *MOST[1:]), (lambda value: isinstance(value, bool) or _is_number(value), "a number")),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _BY_NAME),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _BY_NAME),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("additionalItems", "additionalProperties", "propertyNames", "contains"), _SCHEMA),
    **dict.fromkeys(("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
    "items": (lambda value: _is_schema(value) or isinstance(value, list), "a schema or a list of schemas"),
    "type": (lambda value: isinstance(value, str) or _is_names(value), "a name or a list of names"),
    "required": (_is_names, "a list of names"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
}


def check_forms(schema: Any, field: str) -> dict[int, tuple[str, ...]]:
    """Return the path of each object schema, by its identity. Raises `ParamError` for the first invalid keyword."""
    logic, places = Logic(schema), dict[int, tuple[str, ...]]()
    todo: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    referenced: list[tuple[tuple[str, ...], Any]] = []  # targets of references, which may be outside of known keywords
    while todo or referenced:
        path, node = todo.pop() if todo else referenced.pop()
        if not _is_schema(node):
            raise ParamError(".".join((field, *path)), node, f"must be {_SCHEMA[1]}")
        if isinstance(node, bool) or id(node) in places:
            continue
        places[id(node)] = path
        for name, value in node.items():
            if value is None or name not in _FORMS:
                continue
            is_one, words = _FORMS[name]
            at = (*path, name)
            if not is_one(value):
                raise ParamError(".".join((field, *at)), value, f"must be {words}")
            if name == "$ref" and (target := logic.target(value)) is not None:
                referenced.append((tuple(value.split("/")[1:]), target))
            elif name == "dependentRequired" or (name == "dependencies" and any(map(_is_names, value.values()))):
                for key, names in value.items():
                    if isinstance(names, Mapping | bool):
                        todo.append(((*at, key), names))
                    elif not _is_names(names):
                        raise ParamError(".".join((field, *at, key)), names, "must be a list of names")
            elif _FORMS[name] is _BY_NAME:
                todo += [((*at, key), below) for key, below in value.items()]
            elif _FORMS[name] is _SCHEMAS or (isinstance(value, list) and name == "items"):
                todo += [((*at, str(i)), below) for i, below in enumerate(value)]
            elif _is_schema(value) and name not in ("uniqueItems", *LEAST, *MOST):
                todo.append((at, value))
    return places
