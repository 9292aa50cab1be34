"""The sources that take longest to check: `python -m benchmark.grammar [--seed 0] [--count 2000]`.

Regular expressions, grammars and schemas by a seeded generator that likes what is known to be slow: counts within
counts, alternatives that overlap, wide classes, references, thousands of alternatives. Of each the processor time of
the check and, of what is taken, that of the engine's compile and of its first masks. The slowest of each kind are
printed; exit code 1 if any takes more than `BAR_S`. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import numpy as np

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE
from minisgl.grammar.check import grammar_of
from minisgl.grammar.matcher import make_matchers
from minisgl.grammar.sources import GrammarSource, Kind
from minisgl.sampling_params import ParamError
from minisgl.tokenizer import Tokenizer

BAR_S = 2.0
NUM_MASKS = 8
CLASSES = ["a", "b", "ab", ".", r"\w", r"\p{L}", "[^a]", r"\d", r"\s", "[a-y]", "(?i:straße)", "é"]
COUNTS = ["*", "+", "?", "{2,}", "{0,30}", "{100}", "{1,1000}", "{0,100000}", "{3}", "*?"]


def expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(CLASSES)
    inner = [expression(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    joined = rng.choice(["", "|", ".*"]).join(inner)
    found = f"({joined}){rng.choice(COUNTS)}"
    return found * rng.choice([1, 1, 1, 2, 20, 400] if depth < 3 else [1])


def schema(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["pattern", "anyOf", "allOf", "object", "array", "enum", "ref", "number", "map", "required"])
    inner = (lambda: schema(rng, depth - 1)) if depth else (lambda: {"type": rng.choice(["string", "integer", "null"])})
    many = rng.choice([2, 3, 10, 40])
    match kind:
        case "pattern":
            return {"type": "string", "pattern": expression(rng, 2), "maxLength": rng.choice([1, 50, 10**6])}
        case "anyOf" | "allOf":
            return {kind: [inner() for _ in range(many)]}
        case "object":
            return {"type": "object", "properties": {f"p{i}": inner() for i in range(many)}}
        case "required":
            names = [f"p{i}" for i in range(many)]
            return {"type": "object", "properties": {name: inner() for name in names}, "required": names}
        case "array":
            return {
                "type": "array",
                "items": inner(),
                "minItems": rng.choice([0, 3, 500]),
                "maxItems": rng.choice([500, 10**5]),
            }
        case "enum":
            return {"enum": [f"{rng.random()}" for _ in range(rng.choice([10, 1000, 3000]))]}
        case "ref":
            return {"$ref": f"#/$defs/d{rng.randrange(6)}"}
        case "number":
            return {"type": "number", "multipleOf": rng.choice([0.01, 7, 997]), "minimum": -rng.random() * 10**6}
        case _:
            return {
                "type": "object",
                "patternProperties": {expression(rng, rng.choice([1, 2])): inner() for _ in range(3)},
            }


def with_definitions(rng: random.Random) -> Any:
    return {"$defs": {f"d{i}": schema(rng, 1) for i in range(6)}, "allOf": [schema(rng, rng.choice([1, 2, 2, 3]))]}


def lark(rng: random.Random) -> str:
    names = [f"r{i}" for i in range(rng.choice([3, 10, 300]))]

    def rule() -> str:
        atoms = [
            rng.choice([rng.choice(names), f"/{expression(rng, 1)}/", '"ab"', '"a"', "T"])
            for _ in range(rng.randint(1, 5))
        ]
        return " ".join(atom + rng.choice(["", "", "*", "?", "+", "{3,200}", "{0,5000}"]) for atom in atoms)

    rules = [f"{name}: {' | '.join(rule() for _ in range(rng.choice([1, 2, 8])))}" for name in names]
    return "\n".join([f"start: {rng.choice(names)}", *rules, f"T: /{expression(rng, 2)}/ | /{expression(rng, 1)}/"])


MAKE: dict[Kind, Any] = {
    "regex": lambda rng: expression(rng, rng.choice([1, 2, 3, 4])),
    "json_schema": with_definitions,
    "grammar": lark,
    "choice": lambda rng: [rng.choice("ab") * rng.randint(1, 60) + str(i) for i in range(rng.choice([10, 1000, 1900]))],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    given = parser.parse_args()
    make = make_matchers(Tokenizer.open(None).to_json(), VOCAB_SIZE, [EOS_ID])
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    slowest: dict[str, tuple[float, int, str]] = {}
    num_taken = 0
    for number in range(given.count):
        rng = random.Random(f"{given.seed} {number}")
        kind = rng.choice(list(MAKE))
        value = MAKE[kind](rng)

        def note(what: str, began: float) -> None:
            took = time.thread_time() - began
            name = f"{kind}, {what}"  # noqa: B023
            slowest[name] = max(slowest.get(name, (0.0, 0, "")), (took, number, repr(value)[:120]))  # noqa: B023

        began = time.thread_time()
        try:
            grammar = grammar_of(GrammarSource(kind, value, "f"))
        except ParamError:
            note("refused", began)
            continue
        note("taken", began)
        num_taken += 1
        began = time.thread_time()
        matcher = make(grammar)
        note("engine's compile", began)
        for _ in range(NUM_MASKS):
            began = time.thread_time()
            matcher.fill(mask)
            note("engine's mask", began)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            matcher.consume(int(rng.choice(allowed)))
    for name, (took, number, text) in sorted(slowest.items()):
        print(f"{name:32} {1000 * took:8.1f} ms  number {number}: {text}")
    worst = max(took for took, _, _ in slowest.values())
    print(json.dumps({"count": given.count, "taken": num_taken, "slowest_s": round(worst, 3), "ok": worst <= BAR_S}))
    return 0 if worst <= BAR_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
