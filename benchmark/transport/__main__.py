"""Operations per second of the typed messages beside generic msgpack of dicts and pickle, in one run.

    python -m benchmark.transport [--rounds 30] [--out FOLDER]

An operation is one message, encoded by the sender and decoded by the receiver into what it works with (codecs.py). The
codecs take turns in short rounds, so that what else the machine does hits all alike; figures are medians of the rounds.
The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.transport.codecs import CODECS, Codec, Prompt, Step, facts
from minisgl.bench.report import Report, print_result, table
from minisgl.sampling_params import SamplingParams

ROUND_S = 0.02
BASE = "typed"
Work = Callable[[Codec], Callable[[], object]]


def a_step(rows: int) -> Step:
    rng = np.random.default_rng(rows)
    reasons = np.zeros(rows, np.int32)
    reasons[:: max(rows // 2, 1)] = 2
    return Step(1234, rng.integers(0, 10**6, rows), rng.integers(0, 150_000, rows, np.int32), reasons)


def a_prompt(length: int) -> Prompt:
    tokens = np.random.default_rng(length).integers(0, 150_000, length, np.int32)
    return Prompt(17, tokens, SamplingParams(temperature=0.7, max_tokens=128, seed=5, stop=("\n\n",)))


def step_case(rows: int) -> Work:
    step = a_step(rows)
    return lambda codec: lambda: codec.decode_step(codec.encode_step(step))


def prompt_case(length: int) -> Work:
    prompt = a_prompt(length)
    return lambda codec: lambda: codec.decode_prompt(codec.encode_prompt(prompt))


CASES: dict[str, Work] = {
    "tokens of a step, 1 row": step_case(1),
    "tokens of a step, 64 rows": step_case(64),
    "tokens of a step, 256 rows": step_case(256),
    "a request of 200 tokens": prompt_case(200),
    "a request of 4,000 tokens": prompt_case(4000),
}


def check() -> None:
    """All codecs say the same; raises `AssertionError`."""
    step, prompt = a_step(64), a_prompt(200)
    rows = list(zip(*(array.tolist() for array in step[1:]), strict=True))
    sent = facts((prompt.req_id, prompt.tokens, prompt.sampling))
    for name, codec in CODECS.items():
        assert codec.decode_step(codec.encode_step(step)) == rows, name
        assert facts(codec.decode_prompt(codec.encode_prompt(prompt))) == sent, name


def rate(work: Callable[[], object], seconds: float) -> float:
    """Operations per second of this process's CPU time (others may share the core), over about `seconds` of it."""
    number, began = 0, time.process_time()
    while (passed := time.process_time() - began) < seconds:
        for _ in range(10):
            work()
        number += 10
    return number / passed


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Operations per second by case, codec and round."""
    found: dict[str, dict[str, list[float]]] = {}
    for case, make in CASES.items():
        works = {name: make(codec) for name, codec in CODECS.items()}
        rates: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(rounds):
            for name in list(works) if turn % 2 == 0 else reversed(works):
                rates[name].append(rate(works[name], ROUND_S))
        found[case] = rates
    return found


def sizes() -> dict[str, dict[str, int]]:
    """Bytes of a message."""
    step, prompt = a_step(256), a_prompt(4000)
    return {
        name: {
            "tokens of a step, 256 rows": len(codec.encode_step(step)),
            "a request of 4,000 tokens": len(codec.encode_prompt(prompt)),
        }
        for name, codec in CODECS.items()
    }


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.transport", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="folder for raw.json and README.md")
    options = parser.parse_args(args)
    command = f"python -m benchmark.transport --rounds {options.rounds}"
    report = (
        None if options.out is None else Report(options.out, "Typed messages beside dicts and pickle", command=command)
    )
    check()
    gc.collect()
    gc.disable()
    try:
        rounds = measure(options.rounds)
    finally:
        gc.enable()
    medians = {case: {name: statistics.median(r) for name, r in rates.items()} for case, rates in rounds.items()}
    others = [name for name in CODECS if name != BASE]
    rows: list[list[Any]] = [
        [case, *by_name.values(), *(f"{100 * (by_name[BASE] / by_name[name] - 1):+.0f} %" for name in others)]
        for case, by_name in medians.items()
    ]
    figures = table(["message", *CODECS, *(f"against {name}" for name in others)], rows)
    print(figures)
    if report is not None:
        text = "Messages per second of CPU time, encoded and decoded in one process; medians of the rounds, in turns."
        report.section("Operations per second", text, figures)
        by_codec = sizes()
        cases = list(by_codec[BASE])
        report.section("Bytes", table(["message", *CODECS], [[c, *(by_codec[n][c] for n in CODECS)] for c in cases]))
        report.write({"operations_per_s": rounds, "bytes": by_codec})
    print_result({"benchmark": "transport", "operations_per_s": medians})
    return 0


if __name__ == "__main__":
    sys.exit(main())
