"""JSON schemas, random ones too; answers that a grammar allows, drawn byte by byte; what jsonschema says of them."""

from __future__ import annotations

import copy
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE
from minisgl.grammar import pieces
from minisgl.grammar.check import taken
from minisgl.grammar.slots import Matcher
from minisgl.grammar.sources import GrammarSource
from tests.helpers.grammars import matcher

_SPACE = frozenset(b" \n\t\r")
_USUAL = frozenset(b"abcdefgXYZ0123456789-_.:@/ ")
_ENDS = b'}]"n'  # null ends what could go on
SOFT, HARD = 150, 1500  # bytes after which an answer is led to its end, and given up


@dataclass
class Drawn:
    """`wrong`: answers that do not fit, with what is wrong. `dead`: beginnings after which nothing can come."""

    left_out: tuple[str, ...]
    num_whole: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)


def source(schema: Any, strict: bool = False) -> GrammarSource:
    return GrammarSource("json_schema", schema, "f", strict=strict)


def answers(schema: Any, num_walks: int, seed: str) -> Drawn:
    """Draw answers to a schema. Raises `ParamError` if it is refused."""
    found = taken(source(schema))
    start = matcher(pieces.grammar(pieces.piece(found)))
    drawn, rng = Drawn(found.left_out), random.Random(seed)
    asked = without(schema, found.left_out)
    kind = jsonschema.Draft7Validator if '"items": [' in json.dumps(asked) else jsonschema.Draft202012Validator
    validator = validator_for(asked, default=kind)(asked, format_checker=kind.FORMAT_CHECKER)
    for _ in range(num_walks):
        text, is_dead = walk(start.copy(), rng)
        if is_dead:
            drawn.dead.append(text or "")
        elif text is not None:
            drawn.num_whole += 1
            error = next(iter(validator.iter_errors(json.loads(text))), None)
            if error is not None:
                drawn.wrong.append((text, f"{error.message} at {list(error.absolute_schema_path)}"))
    return drawn


def walk(made: Matcher, rng: random.Random) -> tuple[str | None, bool]:
    """Return an answer, None for one too long; or the beginning of one, and True, if only white space can come."""
    text = bytearray()
    while len(text) < HARD:
        may = _allowed(made)
        if EOS_ID in may and (len(may) == 1 or len(text) > SOFT or rng.random() < 0.5):
            return text.decode(), False
        some = [one for one in may if one != EOS_ID and one not in _SPACE]
        if not some:
            return text.decode(errors="replace"), EOS_ID not in may
        text.append(_next(some, len(text) > SOFT, rng))
        made.consume(text[-1])
    return None, False


def _next(some: list[int], to_end: bool, rng: random.Random) -> int:
    if len(some) > 40:  # a text
        if ord('"') in some and (to_end or rng.random() < 0.3):
            return ord('"')
        return rng.choice([one for one in some if one in _USUAL] or some) if rng.random() < 0.9 else rng.choice(some)
    ends = [one for one in _ENDS if one in some] if to_end else []
    return ends[0] if ends else rng.choice(some)


def _allowed(made: Matcher) -> list[int]:
    mask = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)
    made.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def without(schema: Any, places: tuple[str, ...]) -> Any:
    """Return `schema` without these keywords, without nulls, and without patterns that Python does not read."""
    found = copy.deepcopy(schema)
    for place in sorted(places, key=len, reverse=True):
        *path, name = place.split(".")[1:]
        one = found
        for part in path:
            one = one[int(part)] if isinstance(one, list) else one.get(part, {})
        if name == "oneOf":
            one["anyOf"] = one.pop("oneOf")
        one.pop(name, None)
        for other in ("minContains", "maxContains") if name == "contains" else ():
            one.pop(other, None)
    todo = [found]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            for name, value in list(one.items()):
                is_unread = name == "pattern" and re.search(r"\\p|\\u\{|\(\?<[a-z]", str(value))
                if is_unread or (value is None and name != "const"):
                    del one[name]
        todo += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return found


# ------------------------------------------------------------------------------------------------------ random schemas

NAMES = ("a", "b", "c", "k_1")
LEAVES: tuple[Any, ...] = (
    *(True, {"type": "string"}, {"const": "x"}, {"type": "integer"}, {"enum": ["p", "q"]}, {"type": "boolean"}),
)
VALUES: tuple[Any, ...] = ("a", "b", "xy", 0, 1, 2, 1.5, True, False, None, [], {}, ["a"], {"a": 1})
KEY_SCHEMAS: tuple[Any, ...] = (
    *(True, {}, False, {"type": "string"}, {"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"maxLength": 1}),
    *({"minLength": 2}, {"const": "k_1"}, {"format": "uuid"}, {"anyOf": [{"const": "a"}, {"pattern": "^x+$"}]}),
    *({"pattern": "^k_1$"},),
)
JUNK: tuple[Any, ...] = (None, 5, "x", [], {}, [[1]], {"a": 5}, -1, 2.0, True)
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


class Random:
    """Schemas with every keyword, in every order."""

    def __init__(self, seed: int, junk: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.junk = junk  # how often a keyword has any value

    def root(self) -> dict[str, Any]:
        found = self.schema(3)
        chain = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/B"}}}
        definitions = {"A": self.schema(1), "B": {**chain, "required": ["n"]}}
        whole = {**(found if isinstance(found, dict) else {"allOf": [found]}), "$defs": definitions}
        return dict(json.loads(json.dumps(whole)))  # as from a client: no part is in two places

    def schema(self, depth: int) -> Any:
        rng, draw = self.rng, self.rng.random
        if draw() < 0.06:
            return rng.choice([True, False, {}])
        kinds = [rng.choice(TYPES)] if draw() < 0.8 else rng.sample(TYPES, 2)
        found: dict[str, Any] = {} if draw() < 0.1 else {"type": kinds[0] if len(kinds) == 1 else kinds}
        below = [self.below(depth) for _ in range(14)]
        rare: list[tuple[float, dict[str, Any]]] = []
        if "object" in kinds or "type" not in found:
            rare += [
                (0.8, {"properties": {name: self.below(depth) for name in rng.sample(NAMES, rng.randint(1, 3))}}),
                (0.5, {"required": rng.sample(NAMES, rng.randint(1, 2))}),
                (0.3, {"additionalProperties": rng.choice([False, True, {"type": "integer"}])}),
                (0.15, {"patternProperties": {rng.choice(["^k_1$", "^(a|b)$", "^x", "b$", "^", "^a?$"]): below[0]}}),
                (0.1, {"minProperties": rng.randint(0, 3)}),
                (0.1, {"maxProperties": rng.randint(0, 3)}),
                (0.15, {"propertyNames": rng.choice(KEY_SCHEMAS)}),
                (0.12, {"dependentRequired": {rng.choice(NAMES): rng.sample(NAMES, rng.randint(0, 2))}}),
                (0.08, {"dependentSchemas": {rng.choice(NAMES): below[1]}}),
                (0.1, {"unevaluatedProperties": rng.choice([False, True, {"type": "string"}])}),
            ]
        if "array" in kinds or "type" not in found:
            rare += [
                (0.6, {"items": below[2]}),
                (0.25, {"prefixItems": below[3 : 3 + rng.randint(1, 2)]}),
                (0.3, {"minItems": rng.randint(0, 3)}),
                (0.3, {"maxItems": rng.randint(0, 4)}),
                (0.2, {"uniqueItems": draw() < 0.7}),
                (0.15, {"contains": below[5]}),
                (0.1, {"contains": below[5], "minContains": rng.randint(0, 2), "maxContains": rng.randint(0, 2)}),
                (0.1, {"unevaluatedItems": draw() < 0.5}),
            ]
        if "string" in kinds or "type" not in found:
            patterns = ["^a", "b$", "^[ab]+$", "^(?!a)[abc]*$", "\\bx", "^(?=b).*$", "x|y"]
            rare += [
                (0.3, {"minLength": rng.randint(0, 4)}),
                (0.3, {"maxLength": rng.randint(0, 6)}),
                (0.2, {"pattern": rng.choice(patterns)}),
                (0.15, {"format": rng.choice(["date", "date-time", "uuid", "password", "time", "ipv4", "int32"])}),
            ]
        if {"integer", "number"} & {*kinds} or "type" not in found:
            rare += [
                (0.3, {"minimum": rng.choice([0, 1, -5, 2.5])}),
                (0.3, {"maximum": rng.choice([0, 10, 7, 2.5])}),
                (0.1, {"exclusiveMinimum": rng.randint(-2, 3), "exclusiveMaximum": rng.randint(0, 9)}),
                (0.15, {"multipleOf": rng.choice([1, 2, 5, 3])}),
            ]
        conditions = [below[6], {"properties": {rng.choice(NAMES): {"const": "p"}}, "required": [rng.choice(NAMES)]}]
        rare += [
            (0.08, {"enum": [rng.choice(VALUES) for _ in range(rng.randint(1, 4))]}),
            (0.04, {"const": rng.choice(VALUES)}),
            (0.12, {"not": rng.choice([below[7], {"required": [rng.choice(NAMES)]}, {"enum": ["a", 1]}])}),
            (0.1, {"anyOf": below[8 : 8 + rng.randint(1, 3)]}),
            (0.12, {"oneOf": below[9 : 9 + rng.randint(1, 3)]}),
            (0.08, {"allOf": below[10 : 10 + rng.randint(1, 2)]}),
            (0.08, {"if": rng.choice(conditions), "then": below[12], "else": below[13]}),
            (0.04, {"$ref": rng.choice(["#/$defs/A", "#/$defs/B"])}),
        ]
        for chance, keywords in rare:
            if draw() < chance:
                found |= keywords
        for name in found:
            if draw() < self.junk:
                found[name] = rng.choice(JUNK)
        keys = list(found)
        rng.shuffle(keys)
        return {name: found[name] for name in keys}

    def below(self, depth: int) -> Any:
        return self.schema(depth - 1) if depth > 0 and self.rng.random() < 0.5 else self.rng.choice(LEAVES)
