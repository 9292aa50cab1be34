"""What grammars cost a step of the engine process: `python -m benchmark.grammar.step_cost [--tokenizer FOLDER]`.

Without a grammar in the batch: the calls that each step makes then, timed alone, and whole steps of the loop on the
echo engine, in a process that has had a grammar and in one that has not. With some: mask, check and consume of a row of
a large vocabulary, on one core, over documents of English words, and the mask's way into float32 logits. Times of
single calls are the best of several runs, those of rows processor time: the machine is never quiet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher

from minisgl.engine.echo import EchoEngine
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import GrammarSlots
from minisgl.kernels.token_mask import mask_tokens
from minisgl.message import AddRequest
from minisgl.runner.compiling import Compiling
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.tokenizer import Tokenizer

ROWS = 64
RUNS = 15
FIELDS = [*({"type": "string", "maxLength": 40} for _ in range(20)), *({"type": "integer"} for _ in range(10))]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {f"field_{i}": field for i, field in enumerate(FIELDS)},
    "required": [f"field_{i}" for i in range(len(FIELDS))],
    "additionalProperties": False,
}


def best_us(work: Callable[[], object], times: int) -> float:
    """Of one call."""
    found = []
    for _ in range(RUNS):
        began = time.perf_counter_ns()
        for _ in range(times):
            work()
        found.append((time.perf_counter_ns() - began) / times / 1000)
    return min(found)


def calls_without_a_grammar() -> dict[str, float]:
    """All that a step without grammars does for them, in the loop and in an engine."""
    slots, compiling, rows = GrammarSlots(151_936, (0,)), Compiling(None), list(range(ROWS))
    failures: dict[int, str] = {}
    freed = np.zeros(0, np.int32)

    def step() -> None:
        for _ in compiling.take():
            pass
        slots.free(freed)
        slots.masks(rows)
        if failures:
            raise AssertionError

    return {"calls of a step, us": best_us(step, 10_000)}


def whole_steps() -> dict[str, float]:
    """Of the same rows at the same lengths, in turns; one loop has had a grammar, which is over."""
    loops = [_loop(had_grammar=had) for had in (False, True)]
    found: list[list[float]] = [[], []]
    for _ in range(400):
        for loop, times in zip(loops, found, strict=True):
            began = time.perf_counter_ns()
            loop.step([])
            times.append((time.perf_counter_ns() - began) / 1000)
    never, had = (float(np.percentile(times, 20)) for times in found)
    return {"step, never a grammar, us": never, "step, grammars are over, us": had}


def _loop(*, had_grammar: bool) -> StepLoop:
    config = ControlPlaneConfig(16_384, 16, ROWS, 8192, 8192, (256,))
    engine = EchoEngine(
        num_pages=16_384, page_size=16, max_rows=ROWS, max_seq_len=8192, context_len=8192, worker_thread=False
    )
    compiler = GrammarCompiler(None, 258, (256,), threaded=False)
    loop = StepLoop(make_control_plane("rust_hotpath", config), engine, lambda messages: None, compiler=compiler)

    def add(req_id: int, **more: Any) -> AddRequest:
        sampling = SamplingParams(max_tokens=7000, seed=req_id, **more)
        return AddRequest(req_id, np.array([req_id], np.int32).tobytes(), sampling)

    if had_grammar:
        loop.step([add(i, grammar=LLMatcher.grammar_from_regex("[a-c]{5}")) for i in range(10_000, 10_000 + ROWS)])
        while not loop.idle:
            loop.step([])
    loop.step([add(i, ignore_eos=True) for i in range(ROWS // 2)])
    return loop


def document(rng: np.random.Generator) -> str:
    words = "the of and to in is it that he was for on are as with his they at be this have from".split()  # noqa: SIM905

    def value(field: dict[str, Any]) -> Any:
        if field["type"] == "integer":
            return int(rng.integers(-1000, 100_000))
        return " ".join(rng.choice(words, int(rng.integers(1, 8))))[: field["maxLength"]]

    return json.dumps({f"field_{i}": value(field) for i, field in enumerate(FIELDS)}, separators=(",", ":"))


def rows_with_a_grammar(folder: str, vocab_size: int, eos_id: int) -> dict[str, float]:
    """Documents of the schema, a token at a time."""
    compiler = GrammarCompiler(folder, vocab_size, (eos_id,), threaded=False)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
    began = time.perf_counter()
    compiler.submit(0, grammar)
    first_s = time.perf_counter() - began
    assert not (found := compiler.take()[0]).error, found.error
    tokenizer = Tokenizer.open(folder)
    compiles, times, rng = [], list[float](), np.random.default_rng(0)
    for seed in range(1, 21):
        began = time.perf_counter()
        compiler.submit(seed, grammar)
        compiles.append(time.perf_counter() - began)
        slots = GrammarSlots(vocab_size, (eos_id,))
        slots.assign(0, compiler.take()[0].matcher, [])
        for token in [*tokenizer.encode(document(rng), add_special_tokens=False).tolist(), eos_id]:
            tokens = np.array([token], np.int32)
            began_ns = time.thread_time_ns()
            slots.masks([0])
            failures = slots.record([0], tokens)
            times.append((time.thread_time_ns() - began_ns) / 1000)
            assert not failures, failures
    return {
        "first compile, with tokenizer, ms": first_s * 1000,
        "compile p99, ms": float(np.percentile(compiles, 99)) * 1000,
        "mask, check, consume: median, us": float(np.median(times)),
        "mask, check, consume: mean, us": float(np.mean(times)),
        "mask, check, consume: p99, us": float(np.percentile(times, 99)),
        "tokens": float(len(times)),
    }


def way_into_the_logits(vocab_size: int) -> dict[str, float]:
    torch.set_num_threads(1)
    logits = torch.randn(8, vocab_size)
    bits = torch.from_numpy(
        np.random.default_rng(0).integers(-(2**31), 2**31, (8, -(-vocab_size // 32))).astype(np.int32)
    )
    rows = torch.arange(8, dtype=torch.int32)
    return {"apply in torch, us a row": best_us(lambda: mask_tokens(logits, rows, bits), 5) / 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", help="a folder with a large tokenizer.json; none: only what needs none")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--eos-id", type=int, default=151_645)
    given = parser.parse_args()
    found = calls_without_a_grammar() | whole_steps() | way_into_the_logits(given.vocab_size)
    if given.tokenizer is not None:
        found |= rows_with_a_grammar(given.tokenizer, given.vocab_size, given.eos_id)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2))


if __name__ == "__main__":
    main()
