"""What grammars cost the CPU engine: `python -m benchmark.grammar.engine_time`.

The mask's way into a row's float32 logits, by kinds of masks; and the time of a step of the embedded model in which
no row, half of them or all have a grammar, in rounds that take turns: the same rows at the same lengths, medians of all
steps.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from minisgl._rust import CpuSampler
from minisgl.config import EngineConfig
from minisgl.engine.api import SlotAssignment
from minisgl.grammar.check import grammar_of
from minisgl.grammar.sources import GrammarSource
from minisgl.message import AddRequest
from minisgl.runner.build import build_compiler, build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams

STEPS, WARM = 48, 8
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 40}


def masks(words: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    few = np.zeros(words, np.int32)
    few[rng.integers(0, words, 30)] = rng.integers(1, 2**31, 30)
    most = np.full(words, -1, np.int32)
    most[rng.integers(0, words, words // 8)] = rng.integers(0, 2**31, words // 8)
    return {"none": None, "few ids": few, "most ids": most, "noise": rng.integers(-(2**31), 2**31, words, np.int32)}


def apply_us(vocab_size: int, runs: int) -> dict[str, float]:
    """A greedy row with a mask, less the same row without."""
    sampler = CpuSampler(1, vocab_size, ())
    greedy = SamplingParams(seed=1, temperature=0.0)
    sampler.bind(SlotAssignment(0, 0, greedy, np.array([1], np.int32), 1))
    logits = np.random.default_rng(1).standard_normal((1, vocab_size)).astype(np.float32)
    kinds = masks(-(-vocab_size // 32))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(runs):
        for kind, mask in kinds.items():
            row = logits.copy()
            began = time.perf_counter_ns()
            sampler.step(row, [0], [1], None if mask is None else [mask])
            times[kind].append((time.perf_counter_ns() - began) / 1000)
    plain = float(np.median(times.pop("none")))
    return {f"apply, {kind}, us a row": float(np.median(found)) - plain for kind, found in times.items()}


class Rounds:
    """`STEPS` steps of `rows` requests each; a step is waited for before the next."""

    def __init__(self, rows: int) -> None:
        config = EngineConfig(model="smollm2", engine="cpu", num_pages=4096, max_running_requests=16)
        self._engine = build_engine(config, lambda text, done=0, total=0: None)
        self._loop = StepLoop(
            build_control_plane(config, self._engine.info),
            self._engine,
            lambda messages: None,
            overlap=False,
            compiler=build_compiler(self._engine.info),
        )
        self._rows, self._next_id = rows, 0
        self._grammar = grammar_of(GrammarSource("json_schema", PEOPLE, "schema"))

    def run(self, structured: int) -> list[float]:
        """Seconds of each step; the first so many rows have a grammar."""
        adds = []
        for row in range(self._rows):
            prompt = np.random.default_rng(row).integers(1000, 40_000, 32).astype(np.int32)
            more: dict[str, Any] = {"grammar": self._grammar} if row < structured else {"ignore_eos": True}
            sampling = SamplingParams(max_tokens=STEPS + WARM, seed=row, temperature=1.0, **more)
            adds.append(AddRequest(self._next_id, prompt.tobytes(), sampling))
            self._next_id += 1
        self._loop.step(adds)
        while self._loop.control_plane.stats().num_running < self._rows:
            self._loop.wait_for_grammar()
            self._loop.step([])
        times = []
        while not self._loop.idle:
            running = self._loop.control_plane.stats().num_running
            began = time.perf_counter()
            self._loop.step([])
            if running == self._rows:
                times.append(time.perf_counter() - began)
        return times[2:-2]

    def close(self) -> None:
        self._engine.close()


def step_times(rows: int, rounds: int) -> dict[str, float]:
    kinds = {"none": 0, "half": rows // 2, "all": rows}
    driver = Rounds(rows)
    driver.run(rows)
    per_round: dict[str, list[float]] = {kind: [] for kind in kinds}
    quickest: dict[str, list[float]] = {kind: [] for kind in kinds}  # steps that the machine's other work left alone
    for turn in range(rounds):
        order = list(kinds) if turn % 2 else list(reversed(kinds))
        for kind in order:
            times = driver.run(kinds[kind])
            per_round[kind].append(float(np.median(times)))
            quickest[kind].append(float(np.percentile(times, 10)))
    driver.close()
    none = np.array(per_round["none"])
    found = {f"{rows} rows, none, ms a step": float(np.median(none)) * 1000}
    found[f"{rows} rows, none, ms a step, p10"] = float(np.median(quickest["none"])) * 1000
    for kind in ("half", "all"):
        found[f"{rows} rows, {kind}, % more (median of rounds)"] = float(
            (np.median(np.array(per_round[kind]) / none) - 1) * 100
        )
        quick = np.median(quickest[kind]) / np.median(quickest["none"])
        found[f"{rows} rows, {kind}, % more (p10 of steps)"] = float((quick - 1) * 100)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16])
    given = parser.parse_args()
    found = apply_us(151_936, 300)
    for rows in given.rows:
        found |= step_times(rows, given.rounds)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2))


if __name__ == "__main__":
    main()
