"""Measure operations per second of the typed messages against msgpack of dicts and pickle, in one run.

    python -m benchmark.transport [--rounds 30] [--out FOLDER]

An operation is the tokens of one step, encoded by the sender (from arrays) and decoded by the receiver into a list of
(request id, token, reason). The codecs take turns in short rounds; figures are medians of the rounds, by the CPU time
of this process. The last line of stdout is JSON.

Invariants: every codec carries the same information, which is checked before the clock starts.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import in_turns
from minisgl.message import StepTokens
from minisgl.message.codec import decode_from_engine, encode
from minisgl.step import Int32Array, Int64Array

ROUND_S = 0.02
ROWS = (1, 16, 256)
BASE = "typed"
Row = tuple[int, int, int]


class Step(NamedTuple):
    """Output of a step's commit, [rows] each."""

    req_ids: Int64Array
    tokens: Int32Array
    reasons: Int32Array

    def rows(self) -> list[Row]:
        return list(zip(*(array.tolist() for array in self), strict=True))


class Codec(NamedTuple):
    encode: Callable[[Step], bytes]
    decode: Callable[[bytes], list[Row]]


def _typed(step: Step) -> bytes:
    return encode([StepTokens(1, step.req_ids.tobytes(), step.tokens.tobytes(), step.reasons.tobytes())])


def _read_typed(frame: bytes) -> list[Row]:
    (message,) = decode_from_engine(frame)
    assert isinstance(message, StepTokens)
    arrays = (np.frombuffer(message.req_ids, np.int64), np.frombuffer(message.tokens, np.int32))
    return Step(*arrays, np.frombuffer(message.reasons, np.int32)).rows()


def _dicts(step: Step) -> bytes:
    return _packer.encode([{"type": "token", "req_id": i, "token": t, "reason": r} for i, t, r in step.rows()])


_packer, _unpacker = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
CODECS = {
    BASE: Codec(_typed, _read_typed),
    "msgpack of dicts": Codec(
        _dicts, lambda frame: [(one["req_id"], one["token"], one["reason"]) for one in _unpacker.decode(frame)]
    ),
    "pickle": Codec(lambda step: pickle.dumps(step.rows(), pickle.HIGHEST_PROTOCOL), pickle.loads),
}


def a_step(rows: int) -> Step:
    rng = np.random.default_rng(rows)
    reasons = np.zeros(rows, np.int32)
    reasons[:: max(rows // 2, 1)] = 2
    return Step(rng.integers(0, 10**6, rows), rng.integers(0, 150_000, rows, np.int32), reasons)


def check() -> None:
    """Check that every codec round-trips a step. Raises `AssertionError` if not."""
    for name, codec in CODECS.items():
        assert codec.decode(codec.encode(a_step(16))) == a_step(16).rows(), name


def rate(codec: Codec, step: Step) -> float:
    """Return the operations per second over about `ROUND_S` of CPU time (other processes may share the core)."""
    number, began = 0, time.process_time()
    while (passed := time.process_time() - began) < ROUND_S:
        for _ in range(10):
            codec.decode(codec.encode(step))
        number += 10
    return number / passed


def measure(step: Step, rounds: int) -> dict[str, list[float]]:
    return in_turns(list(CODECS), rounds, lambda name: rate(CODECS[name], step))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="benchmark.transport", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write raw.json and README.md into this folder")
    args = parser.parse_args(arguments)
    command = public_command(arguments, "python -m benchmark.transport")
    report = None if args.out is None else Report(args.out, "Typed messages beside dicts and pickle", command=command)
    check()
    gc.collect()
    gc.disable()
    try:
        samples = {f"tokens of a step, {rows} rows": measure(a_step(rows), args.rounds) for rows in ROWS}
    finally:
        gc.enable()
    medians = {case: {name: statistics.median(rates) for name, rates in of.items()} for case, of in samples.items()}
    rows: list[list[Any]] = [[case, *by_name.values()] for case, by_name in medians.items()]
    figures = table(["messages a second of CPU time", *CODECS], rows)
    print(figures)
    if report is not None:
        report.section("Operations per second", figures)
        report.write({"operations_per_s": samples})
    print_result({"benchmark": "transport", "operations_per_s": medians})
    return 0


if __name__ == "__main__":
    sys.exit(main())
