"""Rewrites JSON schemas in the keywords that the grammar library supports.

Each keyword of a draft is passed on, rewritten, or left out. Keywords without effect are dropped silently:
`uniqueItems: false`, `propertyNames: true`, null. An object that names its properties is closed: clients expect no
other properties, and a small model tends to add some.

Invariants: what fits the served schema fits the given one, except for the places in `left_out`. Under `strict` only
unknown formats are left out, which are annotations; every other keyword is enforced or refused. Closing keeps the
schema satisfiable: if several places describe one object, nothing is closed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from minisgl.grammar.bounds import are_too_many, combines, has_too_many_digits, num_states
from minisgl.grammar.forms import check_forms
from minisgl.grammar.logic import COUNTS, FORMATS, KEYWORDS, LEAST, MOST, Logic, is_equal, none_of, one_of
from minisgl.grammar.patterns import without_lookahead
from minisgl.sampling_params import ParamError

WHOLE = "/"
"""Entry of `without` for all uses of a keyword."""
DRAFTS = frozenset(
    f"{scheme}://json-schema.org/{draft}/schema"
    for scheme, draft in (
        ("https", "draft/2020-12"),
        ("https", "draft/2019-09"),
        ("http", "draft-07"),
        ("http", "draft-06"),
        ("http", "draft-04"),
    )
)
MAX_BRANCHES = 32  # alternatives into which one keyword is rewritten
MAX_ASKED = 512  # queries of the library, for patterns of names
MAX_COMPARED = 64  # alternatives compared pairwise
MAX_ADDED = 2000  # subschemas added to a schema
EXACT = 1 << 53  # above this the library's numbers are inexact
FAR = (1 << 63) - 1024  # largest number of the library
LONG = 10**18  # above this the library has no half-open ranges
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_LISTS = frozenset(("allOf", "anyOf", "prefixItems"))
_SINGLE = frozenset(("items", "additionalItems", "additionalProperties"))
_APPLICATORS = frozenset(("const", "enum", "allOf", "anyOf", "$ref"))
_APART = frozenset(("allOf", "anyOf", "$ref", "required"))  # independent of the keywords next to them
_IN_PLACE = frozenset(("$ref", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef"))
_OF_OBJECTS = frozenset(
    ("properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties")
)
# beside these it is not the properties alone that say what an object may have
_MORE = _IN_PLACE | {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
    "dependentRequired",
    "dependencies",
    "not",
    "allOf",
}
_BASES = frozenset(("$id", "id", "$anchor", "$schema"))
_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_ENDLESS = re.compile(r"[*+]|\{\d+,\}|^(?!.*\$)", re.DOTALL)  # expressions that match more names than any schema has
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")
Path = tuple[str, ...]


@dataclass
class Served:
    schema: Any
    left_out: list[str]
    """Paths of keywords that are not enforced, such as `properties.a.format`."""


def served(
    schema: Any,
    field: str = "",
    strict: bool = False,
    is_empty: Callable[[Any], bool] = lambda _: False,
    without: Mapping[str, frozenset[str]] | None = None,
) -> Served:
    """Rewrite `schema` for the library. `is_empty`: returns whether a schema of strings matches no value. `without`: by
    keyword, the values that the library refused, or `WHOLE`. Raises `ParamError` under `strict`."""
    work = _Work(Logic(schema), field, strict, is_empty, without or {}, check_forms(schema, field), combines(schema))
    closing = not _composes(schema)
    rewritten = work.schema(schema, (), closing)
    while work.waiting:
        reference, name = work.waiting.pop()
        target = work.schema(work.logic.target(reference), (*reference.split("/")[1:],), closing)
        rewritten["$defs"] = {**rewritten.get("$defs", {}), name: target}
    return Served(rewritten, list(dict.fromkeys(work.left_out)))


def closed(schema: Any) -> Any:
    """Return `schema` with `additionalProperties` false in each object that names its properties."""
    return served(schema).schema


def _composes(schema: Any, root: bool = True) -> bool:
    """Return whether one object may be described in several places."""
    todo = [schema]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, Mapping):
            if "allOf" in one or "unevaluatedProperties" in one:
                return True
            places = _IN_PLACE & one.keys()
            if places and (len(places) > 1 or _OF_OBJECTS & one.keys()) and _refers([one[name] for name in places]):
                return True
            todo += [value for name, value in one.items() if name not in ("const", "enum", "default", "examples")]
    return False


def _refers(parts: Sequence[Any]) -> bool:
    """Return whether one of these alternatives is a reference."""
    for part in parts:
        if isinstance(part, str):
            return True
        alternatives = part if isinstance(part, list) else [part]
        if any(isinstance(one, Mapping) and "$ref" in one for one in alternatives):
            return True
    return False


@dataclass
class _Work:
    logic: Logic
    field: str
    strict: bool
    is_empty: Callable[[Any], bool]
    without: Mapping[str, frozenset[str]]
    places: Mapping[int, Path]
    combined: bool
    left_out: list[str] = dataclasses.field(default_factory=list)
    num_added: int = 0
    num_asked: int = 0
    states: list[int] = dataclasses.field(default_factory=list)
    """State counts of the served multiples."""
    moved: dict[str, str] = dataclasses.field(default_factory=dict)
    """New definition names by reference."""
    waiting: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def leave(self, path: Path, name: str, value: Any) -> None:
        if self.strict:
            reason = "cannot be enforced, and `strict` leaves no keyword out: remove it, or `strict`"
            raise ParamError(".".join((self.field, *path, name)), value, reason)
        self.left_out.append(".".join((*path, name)))

    def schema(self, given: Any, path: Path, closing: bool) -> Any:
        """Return the rewritten schema. It is at `path` unless the client wrote it elsewhere."""
        if not isinstance(given, Mapping):
            return given
        path = self.places.get(id(given), path)
        node = {name: value for name, value in _plain(given).items() if not self._leaves(name, value, path, given)}
        out: dict[str, Any] = {}
        more: list[tuple[str, Any]] = []
        for name, value in node.items():
            if (rule := _RULES.get(name)) is not None:
                rewritten = rule(self, node, path)
                self.num_added += 0 if rewritten is None or rewritten is True else 1
                if rewritten is None or self.num_added > MAX_ADDED:
                    self.leave(path, name, value)
                elif rewritten is False:
                    return False
                elif rewritten is not True:
                    if len(rewritten) == 1 and rewritten.keys() <= _APART - node.keys() - out.keys():
                        out |= self.schema(rewritten, path, closing and "properties" not in node)
                    else:
                        more.append((name, rewritten))
            elif name in _MAPS and isinstance(value, Mapping):
                inside = closing and name != "patternProperties"
                refused = self.without.get(name, frozenset()) & value.keys()
                if refused:
                    self.leave(path, name, value)
                remaining = {key: one for key, one in value.items() if key not in refused}
                out[name] = {key: self.schema(one, (*path, name, key), inside) for key, one in remaining.items()}
            elif isinstance(value, list) and (name in _LISTS or name == "items"):
                inside = closing and name != "allOf" and (name == "prefixItems" or "properties" not in node)
                out[name] = [self.schema(one, (*path, name, str(i)), inside) for i, one in enumerate(value)]
            elif name in _SINGLE:
                out[name] = self.schema(value, (*path, name), closing)
            elif name == "$ref":
                out[name] = self._reference(value)
            elif name in _BASES or (name in KEYWORDS and not name.endswith("Contains")):
                out[name] = value
        if closing and _is_closable(node):
            out["additionalProperties"] = False
        if isinstance(pattern := out.get("pattern"), str) and "(?" in pattern:
            first, *others = without_lookahead(pattern)
            out["pattern"] = first
            more += [("pattern", {"pattern": other}) for other in others]
        if out.get("format") in _FORMATS:
            more.append(("format", {"pattern": _FORMATS[out.pop("format")]}))
        self._numbers(node, out, path)
        self._property_counts(node, out, path, closing)
        self._patterns(out, path)
        for name, rewritten in more:
            if rewritten.keys() == {"pattern"} and "pattern" not in out:
                out |= self.schema(rewritten, (*path, name), False)
                continue
            out["allOf"] = [*out.get("allOf", ()), self.schema(rewritten, (*path, name), False)]
        return _in_order(out)

    def _reference(self, given: Any) -> Any:
        """Return a reference to a definition; other targets are served as new definitions, because they may be
        rewritten in place."""
        pointer = self.logic.pointer(given)
        if pointer is None or pointer == "#" or _DEFINITION.fullmatch(pointer) or self.logic.target(pointer) is None:
            return given if pointer is None else pointer
        if pointer not in self.moved:
            self.moved[pointer] = f"referenced {len(self.moved)}"
            self.waiting.append((pointer, self.moved[pointer]))
        return f"#/$defs/{self.moved[pointer].replace(' ', '%20')}"

    def _leaves(self, name: str, value: Any, path: Path, given: Mapping[str, Any]) -> bool:
        """Return whether a keyword is left out: it has no effect here, or the library has refused it."""
        if name == "format" and isinstance(value, str) and value not in FORMATS:
            self.left_out.append(".".join((*path, name)))
            return True
        if name == "$schema":
            return bool(path) or not isinstance(value, str) or value.rstrip("#") not in DRAFTS
        values = self.without.get(name, frozenset())
        is_refused = WHOLE in values or (isinstance(value, str) and value in values)
        is_beside = "$ref" in self.without and "$ref" in given and name in KEYWORDS
        if name == "$ref" or not (is_refused or is_beside):
            return False
        self.leave(path, name, value)
        return True

    # ------------------------------------------------------------------------------------------------ in their place

    def _numbers(self, node: Mapping[str, Any], out: dict[str, Any], path: Path) -> None:
        """Adapt bounds and multiples to the library's number range: inexact bounds move inward, bounds beyond the range
        and unsupported multiples are left out, and a range without a multiple matches nothing."""
        for name in (*LEAST, *MOST):
            value: Any = out.get(name)
            up = name in LEAST
            if not _is_number(value) or abs(value) <= EXACT:
                continue
            del out[name]
            if abs(value) >= FAR and (value < 0) != up:
                self.leave(path, name, node[name])
                continue
            bound = int(max(-FAR, min(value, FAR)))
            if name in ("exclusiveMinimum", "exclusiveMaximum"):  # exclusive bounds are not representable there
                bound += 1 if up else -1
            own, other, inner = ("minimum", "maximum", max) if up else ("maximum", "minimum", min)
            out[own] = inner([_inward(bound, up), *_bounds(out, (own,))])
            if abs(value) >= LONG and (value < 0) != up and not _bounds(out, MOST if up else LEAST):
                out[other] = FAR if up else -FAR
        for name in ("const", "enum"):
            values = [out[name]] if name == "const" and name in out else out.get(name)
            if isinstance(values, list) and not all(map(_is_exact, values)):
                self.leave(path, name, node[name])
                exact = [one for one in values if _is_exact(one)]
                del out[name]
                out |= {"enum": exact} if exact else {"type": node.get("type", "integer")}
        multiple = out.get("multipleOf")
        if multiple is not None and multiple > 0:
            states = [*self.states, num_states(multiple)]
            if has_too_many_digits(multiple) or are_too_many(states, self.combined):
                self.leave(path, "multipleOf", multiple)
                del out["multipleOf"]
                return
            self.states = states
        if multiple is not None and multiple > 0 and self.logic.types(node) <= {"integer", "float"}:
            step = Fraction(str(multiple))
            if self.logic.types(node) == {"integer"}:
                step = Fraction(step.numerator)  # the smallest integer multiple
            if _has_no_multiple(out, step):
                out.pop("multipleOf")
                out["enum"] = []

    def _property_counts(self, node: Mapping[str, Any], out: dict[str, Any], path: Path, closing: bool) -> None:
        """Rewrite `minProperties` and `maxProperties` for objects with optional properties as alternatives. Keys of a
        map may be repeated in the output, so minimum counts of such keys cannot be enforced."""
        least, most = out.pop("minProperties", 0), out.pop("maxProperties", None)
        named = out.get("properties", {})
        required = list(dict.fromkeys(out.get("required", ())))
        optional = [name for name in named if name not in required]
        least = 0 if least <= len(required) else least
        leaves_some = least <= len(required) + len(optional) and (least or most is not None)
        if leaves_some and optional and closing and _is_closable(node, counted=True):
            out["additionalProperties"] = False
        is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
        if is_closed and most is not None and most >= len(required) + len(optional):
            most = None
        if not optional or (not least and most is None):
            if least > len(required) + 1 and not (is_closed and not optional):
                self.leave(path, "minProperties", least)
                least = len(required) + 1
        elif not is_closed or (branches := _choices(required, optional, least, most)) is None:
            for name, value in (("minProperties", least or None), ("maxProperties", most)):
                if value is not None:
                    self.leave(path, name, value)
            return
        else:
            out["allOf"] = [*out.get("allOf", ()), {"anyOf": branches}]
            return
        out |= {"minProperties": least} if least else {}
        out |= {} if most is None else {"maxProperties": most}

    def _patterns(self, out: dict[str, Any], path: Path) -> None:
        """Replace a pattern that matches only names in the schema by these names: if all are taken, the pattern would
        allow a comma that nothing follows."""
        if (patterns := out.get("patternProperties")) is None:
            return
        named = out.get("properties", {})
        out["patternProperties"] = remaining = dict(patterns)
        for pattern, value in patterns.items():
            if value is False and pattern in ("", "^", "$", ".*", "^.*", ".*$", "^.*$"):
                out["additionalProperties"] = False
            if (names := self._names(pattern)) is not None:
                del remaining[pattern]
                named = {
                    **named,
                    **{name: {"allOf": [named[name], value]} if name in named else value for name in names},
                }
        if self.num_asked > MAX_ASKED:
            self.leave(path, "patternProperties", patterns)
            remaining = {}
        if not remaining:
            out.pop("patternProperties")
        if named:
            out["properties"] = named

    def _names(self, pattern: str) -> list[str] | None:
        """Return the schema's names that match a pattern; `None` if other names match, or that is unknown."""
        names = self.logic.names()
        if _ENDLESS.search(_CLASS.sub("x", pattern)) or self.num_asked > MAX_ASKED:
            return None
        self.num_asked += 1
        if not self.is_empty({"type": "string", "allOf": [{"pattern": pattern}, {"pattern": none_of(names)}]}):
            return None
        self.num_asked += len(names)
        return [name for name in names if not self.is_empty({"const": name, "pattern": pattern})]

    # ---------------------------------------------------------------------- rules: True demands nothing, None: unknown

    def one_of(self, node: Mapping[str, Any], path: Path) -> Any:
        """Rewrite `oneOf` as `anyOf`; of alternatives that overlap, each excludes what the rest match."""
        alternatives = node["oneOf"]
        disjoint, overlap = [], len(alternatives) > MAX_COMPARED
        if self.logic.are_tagged(alternatives):
            return {"anyOf": alternatives}
        for i, one in enumerate([] if overlap else alternatives):
            others = [
                other for j, other in enumerate(alternatives) if j != i and not self.logic.is_disjoint(one, other)
            ]
            negated = [self.logic.unless(one, other) for other in others]
            if overlap := None in negated or len(negated) > 4:
                break
            disjoint.append({"allOf": [one, *negated]} if negated else one)
        if overlap:
            self.leave(path, "oneOf", alternatives)
        return {"anyOf": alternatives if overlap else disjoint}

    def not_(self, node: Mapping[str, Any], path: Path) -> Any:
        return self.logic.negated(node["not"])

    def if_(self, node: Mapping[str, Any], path: Path) -> Any:
        condition, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
        if then in (True, {}) and otherwise in (True, {}):
            return True
        negated = self.logic.negated(condition)
        if negated is None:
            return None
        branches = [{"allOf": [condition, then]}, {"allOf": [negated, otherwise]}]
        return {"anyOf": [one for one in branches if False not in one["allOf"]]}

    def contains(self, node: Mapping[str, Any], path: Path) -> Any:
        """Rewrite `contains`: the first items must be the required ones."""
        one, least, most = node["contains"], _count(node, "minContains", 1), node.get("maxContains")
        if (one is False and least) or (most is not None and most < least):
            return self.logic.negated({"type": "array"})
        if not least and most is None:
            return True
        before = node.get("prefixItems", node.get("items"))
        num_before = len(before) if isinstance(before, list) else 0
        can = num_before + least <= _count(node, "maxItems", 1 << 60) and least <= MAX_BRANCHES
        rest = True if most is None else self.logic.negated(one)
        if not can or rest is None or (most is not None and num_before):
            return None
        rewritten = {"items": [*[True] * num_before, *[one] * least], "minItems": num_before + least}
        return rewritten if rest is True else {**rewritten, "additionalItems": rest}

    def unique(self, node: Mapping[str, Any], path: Path) -> Any:
        """Rewrite `uniqueItems` over few values as all their permutations; `None` if there are too many."""
        most = _count(node, "maxItems", 1 << 60)
        if not node["uniqueItems"] or most < 2:
            return True
        items = node.get("items")
        values = None if "prefixItems" in node or items is None else self.logic.values(items)
        if values is None or len(values) > MAX_BRANCHES:
            return None
        distinct = [one for i, one in enumerate(values) if not any(is_equal(one, other) for other in values[:i])]
        sizes = range(_count(node, "minItems", 0), min(most, len(distinct)) + 1)
        if sum(math.perm(len(distinct), size) for size in sizes) > 2 * MAX_BRANCHES:
            return None
        orders = [list(one) for size in sizes for one in itertools.permutations(distinct, size)]
        return {"anyOf": [{"const": one} for one in orders]}

    def dependent(self, keyword: str, node: Mapping[str, Any]) -> Any:
        found, required = [], node.get("required", [])
        for name, one in node[keyword].items():
            asked = {"required": [name, *one]} if isinstance(one, list) else {"allOf": [{"required": [name]}, one]}
            if one not in ([], True, {}):
                found.append(asked if name in required else {"anyOf": [{"properties": {name: False}}, asked]})
        if sum("anyOf" in one for one in found) > 4:
            return None
        return {"allOf": found} if found else True

    def property_names(self, node: Mapping[str, Any], path: Path) -> Any:
        one = self.logic.resolved(node["propertyNames"])
        if self.logic.is_true(one) or one == {"type": "string"}:
            return True
        types = self.logic.types(one)
        if "string" not in types:
            return {"additionalProperties": False}
        if (values := self.logic.values(one)) is not None:
            names = [value for value in values if isinstance(value, str)]
            return {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        pattern = self._name_pattern(one)
        if one.keys() & {"pattern", "format"} == {"pattern", "format"}:
            self.leave((*path, "propertyNames"), "format", one["format"])
        if pattern is None or "patternProperties" in node:
            return None
        return {"patternProperties": {pattern: True}, "additionalProperties": False} if pattern else True

    def _name_pattern(self, given: Any) -> str | None:
        """Return a pattern for the texts that fit; `None` if no single expression does it."""
        one = {name: value for name, value in self.logic.resolved(given).items() if name in KEYWORDS}
        one.pop("type", None)
        if one.get("format", "") not in FORMATS:
            one.pop("format", None)
        if not one:
            return ""
        if (values := self.logic.values(given)) is not None:
            return one_of([value for value in values if isinstance(value, str)])
        if one.keys() in ({"pattern"}, {"pattern", "format"}):
            return str(one["pattern"])
        if one.keys() <= {"minLength", "maxLength"}:
            return f"^[\\s\\S]{{{one.get('minLength', 0)},{one.get('maxLength', '')}}}$"
        if one.keys() == {"format"}:
            return _NAMES_OF_FORMAT.get(one["format"])
        if one.keys() == {"anyOf"}:
            parts = [self._name_pattern(part) if isinstance(part, Mapping) else None for part in one["anyOf"]]
            if parts and None not in parts:
                return "" if "" in parts else "|".join(f"(?:{part})" for part in parts)
        return None

    def unevaluated_properties(self, node: Mapping[str, Any], path: Path) -> Any:
        rest = node["unevaluatedProperties"]
        if rest is True or rest == {}:
            return True
        alternatives = self.logic.evaluated(
            {name: one for name, one in node.items() if name != "unevaluatedProperties"}
        )
        if alternatives and all(one is None for one in alternatives):
            return True
        if not alternatives or None in alternatives or len(alternatives) > MAX_BRANCHES:
            return None
        closings = [({**names, "additionalProperties": rest}, fits) for names, fits in filter(None, alternatives)]
        if len(closings) == 1:
            return closings[0][0]
        return {"anyOf": [{"allOf": [fits, one]} for one, fits in closings]}

    def unevaluated_items(self, node: Mapping[str, Any], path: Path) -> Any:
        rest = node["unevaluatedItems"]
        if rest in (True, {}) or isinstance(node.get("items"), (dict, bool)):
            return True
        if {"contains", "allOf", "if", "not"} & node.keys() or _IN_PLACE & node.keys():
            return None
        before = node.get("prefixItems")
        if isinstance(node.get("items"), list):
            return True if "additionalItems" in node else {"additionalItems": rest, "items": node["items"]}
        return {"items": [True] * len(before), "additionalItems": rest} if before else {"items": rest}

    def dynamic_ref(self, node: Mapping[str, Any], path: Path) -> Any:
        found = self.logic.pointer(node.get("$dynamicRef", node.get("$recursiveRef")))
        return None if found is None else {"$ref": found}


_RULES: dict[str, Callable[[_Work, Mapping[str, Any], Path], Any]] = {
    "oneOf": _Work.one_of,
    "not": _Work.not_,
    "if": _Work.if_,
    "contains": _Work.contains,
    "uniqueItems": _Work.unique,
    "dependentRequired": lambda work, node, _: work.dependent("dependentRequired", node),
    "dependentSchemas": lambda work, node, _: work.dependent("dependentSchemas", node),
    "dependencies": lambda work, node, _: work.dependent("dependencies", node),
    "propertyNames": _Work.property_names,
    "unevaluatedProperties": _Work.unevaluated_properties,
    "unevaluatedItems": _Work.unevaluated_items,
    "$dynamicRef": _Work.dynamic_ref,
    "$recursiveRef": _Work.dynamic_ref,
}
_FEWER_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_LEAP_YEAR = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00"
_YEAR = "[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000"
_DATE = f"(?:(?:{_YEAR})-(?:{_FEWER_DAYS})|(?:{_LEAP_YEAR})-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Patterns for formats whose library versions accept invalid days and seconds."""
_NAMES_OF_FORMAT = {
    **_FORMATS,
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": "^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])$",
}


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords except for those that are null or have no effect, with counts as integers."""
    plain = {}
    for name, value in given.items():
        if value is None and name != "const":
            continue
        plain[name] = int(value) if name in COUNTS else value
    nothing = ("patternProperties", "dependentRequired", "dependentSchemas", "dependencies", "required")
    plain = {name: value for name, value in plain.items() if not (name in nothing and value in ({}, []))}
    return {name: value for name, value in plain.items() if not _is_nothing(name, value, plain)}


def _is_nothing(name: str, value: Any, node: Mapping[str, Any]) -> bool:
    match name:
        case "minProperties":
            return bool(value <= len(set(node.get("required", ()))))
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in (True, {}, {"type": "string"})
        case "not":
            return value is False
        case "if":
            return "then" not in node and "else" not in node
        case "contains":
            return node.get("minContains") == 0 and "maxContains" not in node
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
    return False


def _is_closable(node: Mapping[str, Any], counted: bool = False) -> bool:
    properties, more = node.get("properties", {}), _MORE - {"minProperties"} if counted else _MORE
    return bool(properties) and not more & node.keys() and all(name in properties for name in node.get("required", ()))


def _in_order(out: dict[str, Any]) -> dict[str, Any]:
    """Return `out` with the keywords that describe the value together: the library reads those before a `$ref` or
    `anyOf` without those after it."""
    own = {name: value for name, value in out.items() if name not in _APPLICATORS}
    first = next(iter(out), "")
    others = {name: value for name, value in out.items() if name in _APPLICATORS}
    return others | own if first in _APPLICATORS else own | others


def _choices(required: list[str], optional: list[str], least: int, most: int | None) -> list[Any] | None:
    """Return the alternatives of a closed object with `least` to `most` properties; `None` if there are too many."""
    fewest, largest = max(0, least - len(required)), len(optional)
    if most is not None:
        largest = min(largest, most - len(required))
    if largest < fewest:
        return [False]
    sizes = range(fewest, largest + 1)
    if largest == len(optional):
        sizes = range(fewest, fewest + 1)
    elif not fewest:
        sizes = range(largest, largest + 1)
    if sum(math.comb(len(optional), size) for size in sizes) > MAX_BRANCHES:
        return None
    branches = []
    for some in itertools.chain.from_iterable(itertools.combinations(optional, size) for size in sizes):
        one: dict[str, Any] = {"type": "object"}
        if fewest:
            one["required"] = list(some)
        if largest < len(optional):
            one["properties"] = {name: False for name in optional if name not in some}
        branches.append(one)
    return branches


def _count(node: Mapping[str, Any], name: str, missing: int) -> int:
    found = node.get(name)
    return found if isinstance(found, int) else missing


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bounds(out: Mapping[str, Any], names: Sequence[str]) -> list[float]:
    return [out[name] for name in names if _is_number(out.get(name))]


def _inward(value: int, up: bool) -> int:
    try:
        inward = float(value)
    except OverflowError:
        return value
    if int(inward) != value and (int(inward) < value) == up:
        inward = math.nextafter(inward, math.inf if up else -math.inf)
    return int(inward) if math.isfinite(inward) else value


def _is_exact(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        try:
            return int(float(value)) == value
        except OverflowError:
            return False
    if isinstance(value, Mapping):
        return all(map(_is_exact, value.values()))
    return not isinstance(value, list) or all(map(_is_exact, value))


def _has_no_multiple(out: Mapping[str, Any], step: Fraction) -> bool:
    """Return whether no multiple of `step` is within the bounds."""
    bounds = [[Fraction(str(one)) / step for one in _bounds(out, names)] for names in (LEAST, MOST)]
    if not all(bounds):
        return False
    least, most = math.ceil(max(bounds[0])), math.floor(min(bounds[1]))
    if _is_number(out.get("exclusiveMinimum")) and Fraction(str(out["exclusiveMinimum"])) / step == least:
        least += 1
    if _is_number(out.get("exclusiveMaximum")) and Fraction(str(out["exclusiveMaximum"])) / step == most:
        most -= 1
    return least > most


def keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield every keyword of a schema and its subschemas, with its value."""
    todo = [schema]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, Mapping):
            for name, value in one.items():
                yield name, value
                todo += value.values() if name in _MAPS and isinstance(value, Mapping) else [value]
