"""Logic of JSON schemas: which values a schema allows, whether two exclude each other, what the negation is.

Invariants: a result is exact or "unknown" (`None`, False, all types), never a guess, after a bounded number of steps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

TYPES = frozenset(("null", "boolean", "integer", "float", "string", "array", "object"))
"""Types of values: `number` is `integer` or `float`."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
"""Formats that are enforced; others are annotations."""
COUNTS = frozenset(
    (
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    )
)
LEAST, MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
KEYWORDS = frozenset(
    (
        *("type", "const", "enum", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if"),
        *("properties", "required", "patternProperties", "additionalProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        *("items", "prefixItems", "additionalItems", "contains", "uniqueItems", "unevaluatedItems"),
        *("pattern", "format", "multipleOf", *COUNTS, *LEAST, *MOST),
    )
)
"""Keywords that may forbid a value; all others are annotations."""
MAX_STEPS = 50_000
MAX_DEPTH = 16
MAX_TEXT = 512  # characters of all texts that one pattern excludes
MAX_ALTERNATIVES = 16
MAX_NAMES = 256
_COMBINING = frozenset(("anyOf", "oneOf", "allOf", "$ref"))


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal in JSON: 1 equals 1.0, and not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(is_equal(a[name], b[name]) for name in a)
    return bool(a == b) and isinstance(a, str) == isinstance(b, str)


def one_of(texts: Collection[str]) -> str:
    """Return a pattern that matches exactly these texts."""
    return f"^(?:{'|'.join(map(_escaped, texts))})$" if texts else "^[^\\s\\S]$"


def none_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches all texts but these."""
    return f"^(?:{_but_for(sorted(set(texts)))})$"


def _but_for(texts: list[str]) -> str:
    branches = [] if "" in texts else [""]
    by_first = {
        first: [text[1:] for text in some] for first, some in itertools.groupby(filter(None, texts), lambda t: t[0])
    }
    branches.append(f"[^{''.join(map(_escaped, by_first))}][\\s\\S]*" if by_first else "[\\s\\S]+")
    branches += [f"{_escaped(first)}(?:{_but_for(rest)})" for first, rest in by_first.items()]
    return "|".join(branches)


def _escaped(text: str) -> str:
    return "".join(one if re.fullmatch("[A-Za-z0-9_]", one) else f"\\x{{{ord(one):X}}}" for one in text)


class Logic:
    """Answers questions about the schemas in `root`, which references resolve to."""

    def __init__(self, root: Any) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self._steps = 0
        self._anchors: dict[str, list[str]] | None = None
        self._names: list[str] | None = None

    # ------------------------------------------------------------------------------------------------- references

    def target(self, reference: Any) -> Any:
        """Return the schema that a reference leads to; `None` if it is unknown."""
        node = self._root
        if (pointer := self.pointer(reference)) is None:
            return None
        for part in pointer.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node

    def pointer(self, given: Any) -> str | None:
        """Return the JSON pointer for a reference within the schema; `None` if it leads elsewhere."""
        if not isinstance(given, str):
            return None
        reference: str = given
        if isinstance(base := self._root.get("$id"), str) and base.rstrip("#"):
            reference = reference.removeprefix(base.rstrip("#")) or "#"
        if reference == "#" or reference.startswith("#/"):
            return reference
        if self._anchors is None:
            self._anchors = {}
            todo: list[tuple[str, Any]] = [("#", self._root)]
            while todo:
                at, node = todo.pop()
                items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
                for name, value in items:
                    if name in ("$anchor", "$dynamicAnchor") and isinstance(value, str):
                        self._anchors.setdefault(f"#{value}", []).append(at)
                    elif isinstance(value, (Mapping, list)):
                        todo.append((f"{at}/{quote(str(name).replace('~', '~0').replace('/', '~1'))}", value))
        matches = self._anchors.get(reference, [])
        return matches[0] if len(matches) == 1 else None

    def names(self) -> list[str]:
        """Return the property names in the whole schema, at most `MAX_NAMES`."""
        if self._names is None:
            collected: dict[str, None] = {}
            todo = [self._root]
            while todo:
                node = todo.pop()
                if isinstance(node, Mapping):
                    if isinstance(properties := node.get("properties"), Mapping):
                        collected |= dict.fromkeys(map(str, properties))
                    collected |= dict.fromkeys(name for name in _listed(node, "required") if isinstance(name, str))
                todo += node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
            self._names = list(collected)[:MAX_NAMES]
        return self._names

    def resolved(self, given: Any) -> Any:
        """Resolve a schema that consists of a reference only, and return it without annotations."""
        for _ in range(MAX_DEPTH):
            if not isinstance(given, Mapping):
                return given
            given = {
                name: value
                for name, value in given.items()
                if name in KEYWORDS and (name != "format" or (isinstance(value, str) and value in FORMATS))
            }
            if given.keys() != {"$ref"} or (target := self.target(given["$ref"])) is None:
                return given
            given = target
        return given

    def is_true(self, given: Any) -> bool:
        given = self.resolved(given)
        return given is True or given == {}

    def _goes_on(self, depth: int) -> bool:
        self._steps += 1
        return depth < MAX_DEPTH and self._steps < MAX_STEPS

    # ------------------------------------------------------------------------------------------------------ values

    def types(self, given: Any, depth: int = 0) -> frozenset[str]:
        """Return the types that the schema's values may have."""
        if given is False:
            return frozenset()
        if not isinstance(given, Mapping) or not self._goes_on(depth):
            return TYPES
        types = TYPES
        if isinstance(names := given.get("type"), (str, list)):
            listed = [names] if isinstance(names, str) else names
            types &= frozenset(type_ for name in listed for type_ in _of_name(name))
        for name in ("const", "enum"):
            if name in given:
                values = [given[name]] if name == "const" else given[name]
                types &= frozenset(map(_type_of, values)) if isinstance(values, list) else TYPES
        if (target := self.target(given.get("$ref"))) is not None:
            types &= self.types(target, depth + 1)
        if isinstance(parts := given.get("allOf"), list):
            for part in parts:
                types &= self.types(part, depth + 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(parts := given.get(name), list):
                types &= frozenset[str]().union(*(self.types(part, depth + 1) for part in parts))
        return types

    def values(self, given: Any, depth: int = 0) -> list[Any] | None:
        """Return a list that contains all values that fit the schema, and maybe others; `None` if there is no such
        list."""
        if given is False:
            return []
        if not isinstance(given, Mapping) or not self._goes_on(depth):
            return None
        if "const" in given:
            return [given["const"]]
        if isinstance(given.get("enum"), list):
            return list(given["enum"])
        if given.get("type") in ("null", "boolean"):
            return [None] if given["type"] == "null" else [False, True]
        if (target := self.target(given.get("$ref"))) is not None:
            return self.values(target, depth + 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(parts := given.get(name), list):
                each = [self.values(part, depth + 1) for part in parts]
                return None if None in each else [value for one in each for value in one or ()]
        return None

    # ---------------------------------------------------------------------------------------------------- disjoint

    def is_disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Return whether certainly no value fits both schemas."""
        if a is False or b is False:
            return True
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)) or not self._goes_on(depth):
            return False
        common = self.types(a) & self.types(b)
        if not common:
            return True
        of_a, of_b = self.values(a), self.values(b)
        if of_a is not None and of_b is not None:
            return not any(is_equal(x, y) for x in of_a for y in of_b)
        for x, y in ((a, b), (b, a)):
            if (target := self.target(x.get("$ref"))) is not None and self.is_disjoint(target, y, depth + 1):
                return True
            if any(self.is_disjoint(part, y, depth + 1) for part in _listed(x, "allOf")):
                return True
            for name in ("anyOf", "oneOf"):
                parts = _listed(x, name)
                if parts and all(self.is_disjoint(part, y, depth + 1) for part in parts):
                    return True
            if common == {"object"} and self._differs(x, y, depth):
                return True
            if any(_is_below(x, y, *names) for names in _RANGES if common <= names[0]):
                return True
        return False

    def are_tagged(self, alternatives: list[Any]) -> bool:
        """Return whether one property, required by all alternatives, distinguishes them by its values."""
        schemas = [self.resolved(one) for one in alternatives]
        if not all(isinstance(one, Mapping) and self.types(one) == {"object"} for one in schemas):
            return False
        for name in _listed(schemas[0], "required") if schemas else ():
            each = [self.values(_property(one, name)) if name in _listed(one, "required") else None for one in schemas]
            tags = [value for values in each for value in values or [None]]
            if all(isinstance(tag, str) for tag in tags) and len(tags) == len(set(tags)):
                return True
        return False

    def _differs(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        """Return whether no value of some property that `a` requires fits both schemas."""
        for name in _listed(a, "required"):
            if isinstance(name, str) and self.is_disjoint(_property(a, name), _property(b, name), depth + 1):
                return True
        return False

    # ---------------------------------------------------------------------------------------------------- opposite

    def negated(self, given: Any, depth: int = 0) -> Any:
        """Return a schema, without `not`, for all values that do not fit; `None` if it is unknown."""
        given = self.resolved(given)
        if given is True or given == {}:
            return False
        if given is False:
            return True
        if not isinstance(given, Mapping) or not self._goes_on(depth):
            return None
        alternatives: list[Any] = []
        for name, value in given.items():
            if (some := self._opposite(name, value, given, depth + 1)) is None:
                return None
            alternatives += some
        if len(alternatives) > MAX_ALTERNATIVES:
            return None
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives} if alternatives else False

    def unless(self, one: Any, other: Any) -> Any:
        """Return a schema that keeps values of `one` from fitting `other`, and maybe more; `None` if it is unknown."""
        if (found := self.negated(other)) is not None:
            return found
        if self.types(one) != {"object"}:  # only an object can lack a property
            return None
        own, needs = (
            _listed(x, "required") if isinstance(x := self.resolved(part), Mapping) else [] for part in (one, other)
        )
        missing = [name for name in needs if name not in own]
        return {"anyOf": [{"properties": {name: False}} for name in missing]} if missing else None

    def _opposite(self, name: str, value: Any, given: Mapping[str, Any], depth: int) -> list[Any] | None:
        """Return alternatives that violate one keyword of `given`; `None` if they are unknown."""
        match name:
            case "type":
                return _other_types(TYPES - self.types({"type": value}))
            case "const" | "enum":
                return _other_values([value] if name == "const" else value)
            case "required" if isinstance(value, list):
                return [{"type": "object", "properties": {one: False}} for one in value if isinstance(one, str)]
            case "properties" if isinstance(value, Mapping):
                found = []
                for one, schema in value.items():
                    if (negated := self.negated(schema, depth)) is None:
                        return None
                    if negated is not False:
                        found.append({"type": "object", "required": [one], "properties": {one: negated}})
                return found
            case "not":
                return [value]
            case "allOf" if isinstance(value, list):
                each = [self.negated(one, depth) for one in value]
                return None if None in each else each
            case "anyOf" if isinstance(value, list):
                each = [self.negated(one, depth) for one in value]
                return None if None in each else [{"allOf": each}]
            case _ if name in _BOUNDS and isinstance(value, (int, float)) and not isinstance(value, bool):
                kind, other, by = _BOUNDS[name]
                if by and value + by < 0:
                    return []
                return [{"type": kind, other: value + by}]
        return None

    # --------------------------------------------------------------------------------------------------- evaluated

    def evaluated(self, given: Any, depth: int = 0) -> list[tuple[dict[str, Any], Any] | None]:
        """Return the alternatives of what a schema evaluates of an object: its named properties and patterns, and what
        an object must fit for that. An entry `None` stands for all properties. An empty list means unknown."""
        given = self.resolved(given)
        if isinstance(given, bool):
            return [({"properties": {}, "patternProperties": {}}, given)]
        if (
            not isinstance(given, Mapping)
            or not self._goes_on(depth)
            or {"if", "dependentSchemas", "not"} & given.keys()
        ):
            return []
        if "additionalProperties" in given or given.get("unevaluatedProperties", False) is not False:
            return [None]
        own = {name: dict.fromkeys(given.get(name, ()), True) for name in ("properties", "patternProperties")}
        found: list[tuple[dict[str, Any], Any] | None] = [(own, True)]
        parts = [[one] for one in _listed(given, "allOf")]
        if "$ref" in given:
            target = self.target(given["$ref"])
            if target is None:
                return []
            parts.append([target])
        parts += [list(_listed(given, name)) for name in ("anyOf", "oneOf") if name in given]
        for alternatives in parts:
            is_choice = len(alternatives) > 1
            each = [self.evaluated(one, depth + 1) for one in alternatives]
            if [] in each or sum(map(len, each)) * len(found) > 2 * MAX_ALTERNATIVES:
                return []
            below = [
                (some, one if is_choice else True)
                for one, all_ in zip(alternatives, each, strict=True)
                for some in all_
            ]
            found = [_both(before, some, fits) for before in found for some, fits in below]
        return found


def _both(a: Any, b: Any, fits: Any) -> Any:
    if a is None or b is None:
        return None
    names = {name: {**a[0][name], **b[0][name]} for name in a[0]}
    needs = [one for one in (a[1], b[1], fits) if one is not True]
    return names, {"allOf": needs} if needs else True


def _of_name(name: Any) -> tuple[str, ...]:
    return ("integer", "float") if name == "number" else (str(name),)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "float"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _other_types(left: frozenset[str]) -> list[Any] | None:
    if "float" in left and "integer" not in left:
        return None
    names = sorted(left - {"float", "integer"})
    if "float" in left:
        names.append("number")
    elif "integer" in left:
        names.append("integer")
    return [{"type": names}] if names else []


def _other_values(values: Any) -> list[Any] | None:
    """Return alternatives that match every value but these; `None` if they are unknown."""
    if not isinstance(values, list):
        return None
    kinds = {_type_of(value) for value in values}
    if kinds & {"array", "object"} or sum(len(value) for value in values if isinstance(value, str)) > MAX_TEXT:
        return None
    is_number = bool(kinds & {"integer", "float"})
    alternatives = _other_types(TYPES - kinds - ({"integer", "float"} if is_number else set())) or []
    if "string" in kinds:
        alternatives.append({"type": "string", "pattern": none_of(value for value in values if isinstance(value, str))})
    if "boolean" in kinds:
        alternatives += [{"const": one} for one in (False, True) if not any(value is one for value in values)]
    if is_number:
        numbers = sorted({value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)})
        for after, before in itertools.pairwise([None, *numbers, None]):
            one: dict[str, Any] = {"type": "number"}
            one |= {} if after is None else {"exclusiveMinimum": after}
            one |= {} if before is None else {"exclusiveMaximum": before}
            alternatives.append(one)
    return alternatives


def _listed(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    return found if isinstance(found, list) else []


def _property(given: Mapping[str, Any], name: str) -> Any:
    """Return the schema for a property's values in `given` itself."""
    properties = given.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if given.get("patternProperties") else given.get("additionalProperties", True)


def _is_below(a: Mapping[str, Any], b: Mapping[str, Any], types: Any, most: Any, least: Any) -> bool:
    """Return whether an upper bound of `a` is below a lower bound of `b`."""
    uppers = [(a[name], name.startswith("exclusive")) for name in most if _is_number(a.get(name))]
    lowers = [(b[name], name.startswith("exclusive")) for name in least if _is_number(b.get(name))]
    return any(x < y or (x == y and (open_x or open_y)) for x, open_x in uppers for y, open_y in lowers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_RANGES = (
    ({"integer", "float"}, MOST, LEAST),
    ({"string"}, ("maxLength",), ("minLength",)),
    ({"array"}, ("maxItems",), ("minItems",)),
    ({"object"}, ("maxProperties",), ("minProperties",)),
)
_BOUNDS: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
