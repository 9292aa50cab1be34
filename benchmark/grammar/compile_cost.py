"""What compiling many schemas costs: `python -m benchmark.grammar.compile_cost --tokenizer FOLDER`, with
MIMALLOC_PURGE_DELAY=0 in the environment, as in a server's processes: what is freed is given back.

The tests' own schemas, drawn and by hand, are checked and compiled one after the other as a server does; and what the
process holds after the first and after all. In wall time: the machine's other work is in it.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import psutil
from hypothesis import HealthCheck, Phase, given, settings

from minisgl.grammar.check import grammar_of
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.sources import GrammarSource
from minisgl.sampling_params import ParamError
from tests.helpers.schemas import BY_HAND, drawn

MIB = 2**20


class Timed:
    def __init__(self, folder: str, vocab_size: int, eos_id: int) -> None:
        self._compiler = GrammarCompiler(folder, vocab_size, (eos_id,), threaded=False)
        self.check_ms: list[float] = []
        self.compile_ms: list[float] = []
        self.refused = 0

    def take(self, schema: object) -> None:
        """Check and compile it; nothing is kept of it but the times."""
        began = time.perf_counter()
        try:
            grammar = grammar_of(GrammarSource("json_schema", schema, "schema"))
        except ParamError:
            self.refused += 1
            grammar = None
        self.check_ms.append((time.perf_counter() - began) * 1000)
        if grammar is not None:
            began = time.perf_counter()
            self._compiler.submit(len(self.check_ms), grammar)
            self._compiler.take()
            self.compile_ms.append((time.perf_counter() - began) * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--eos-id", type=int, default=151_645)
    parser.add_argument("--schemas", type=int, default=400)
    wanted = parser.parse_args()
    process = psutil.Process()
    timed = Timed(wanted.tokenizer, wanted.vocab_size, wanted.eos_id)
    grammar_of(GrammarSource("json_schema", {"type": "string"}, "schema"))  # imports
    before = process.memory_info().rss
    timed.take({"type": "string"})
    first = process.memory_info().rss
    timed.check_ms.clear()
    timed.compile_ms.clear()

    @settings(
        max_examples=wanted.schemas,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def run(schema: object) -> None:
        timed.take(schema)

    run()
    for schema in BY_HAND:
        timed.take(schema)
    found = {"schemas": len(timed.check_ms), "refused": timed.refused}
    for name, times in (("check", timed.check_ms), ("compile", timed.compile_ms)):
        for what, value in (("p50", np.percentile(times, 50)), ("p99", np.percentile(times, 99)), ("max", max(times))):
            found[f"{name} {what}, ms"] = round(float(value), 2)
    found["MiB after the first"] = round((first - before) / MIB, 1)
    found["MiB after all"] = round((process.memory_info().rss - before) / MIB, 1)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
