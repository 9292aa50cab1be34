"""An engine of `minisgl bench model`, in its own process: `python -m minisgl.bench.model_run`.

The first line of stdin is an `EngineConfig`, every other a `Point` with its seed; each is answered by a line of JSON.
Invariants: prompts differ, so that the prefix cache only helps as a point demands; loading is not timed; the step loop,
scheduler and engine are the server's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array

FIRST_ID, LAST_ID = 5, 30_000  # smaller ids are often special; all vocabularies are larger


class Point(msgspec.Struct, frozen=True):
    """A measurement, in tokens: prefill of `num_in` tokens after `depth` cached ones, or `num_out` tokens of decoding
    for each of `batch` sequences after `depth` tokens."""

    depth: int = 0
    num_in: int = 0
    num_out: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """The point's name as llama-bench writes it, such as `tg128 x 4 @ d4096`."""
        of = f"pp{self.num_in}" if self.num_in else f"tg{self.num_out}"
        return of + (f" x {self.batch}" if self.batch > 1 else "") + (f" @ d{self.depth}" if self.depth else "")

    @property
    def length(self) -> int:
        return self.depth + self.num_in + self.num_out + 1

    def prompts(self, seed: Sequence[int], vocab: int) -> list[Int32Array]:
        """Return `batch` random prompts of `depth` + `num_in` tokens, at least one."""
        rng = np.random.default_rng(list(seed))
        size = max(self.depth + self.num_in, 1)
        return [rng.integers(FIRST_ID, min(LAST_ID, vocab), size, np.int32) for _ in range(self.batch)]


class Runner:
    """An engine with its step loop, which counts the tokens that arrive."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, lambda text, done=0, total=0: None)
        self._plane = build_control_plane(config, self.engine.info)
        self._loop = StepLoop(self._plane, self.engine, self._take, settings=LoopSettings(overlap=config.overlap))
        self._tokens: dict[int, int] = {}
        self._next_id = 0

    def about(self) -> dict[str, Any]:
        info, engine = self.engine.info, self.engine
        details = engine.rust.about() if isinstance(engine, CpuEngine) else {}
        return {"dtype": info.dtype, "vocab_size": info.vocab_size, **details}

    def ask(self, point: Point, seed: Sequence[int]) -> float:
        """Measure a point and return tokens per second."""
        prompts = point.prompts(seed, self.engine.info.vocab_size)
        if point.num_in:
            if point.depth:
                self._run([prompt[: point.depth] for prompt in prompts], 1)
            before, (first, _, _) = self._computed(), self._run(prompts, 1)
            return (self._computed() - before) / first
        first, whole, done = self._run(prompts, point.num_out + 1)
        return (point.batch * (point.num_out + 1) - done) / (whole - first)

    def _run(self, prompts: Sequence[Int32Array], num_out: int) -> tuple[float, float, int]:
        """Return the seconds until all sequences have a token, those until the end, and the tokens at the first."""
        sampling = SamplingParams(temperature=0, max_tokens=num_out, seed=0, ignore_eos=True)
        requests = [AddRequest(self._next_id + i, one.tobytes(), sampling) for i, one in enumerate(prompts)]
        self._next_id += len(requests)
        self._tokens.clear()
        began = time.perf_counter()
        self._loop.step(requests)
        while len(self._tokens) < len(requests):
            self._loop.step([])
        first, done = time.perf_counter() - began, sum(self._tokens.values())
        while not self._loop.idle:
            self._loop.step([])
        whole = time.perf_counter() - began
        if sum(self._tokens.values()) != len(requests) * num_out:  # all counted tokens must exist
            raise RuntimeError(f"{sum(self._tokens.values())} tokens instead of {len(requests) * num_out}")
        return first, whole, done

    def _computed(self) -> int:
        stats = self._plane.stats()
        return stats.num_prompt_tokens_total - stats.num_cached_tokens_total

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, StepTokens):
                if set(np.frombuffer(message.reasons, np.int32).tolist()) & {FinishReason.ERROR, FinishReason.ABORT}:
                    raise RuntimeError(f"a sequence failed: {message.errors}")
                for req_id in np.frombuffer(message.req_ids, np.int64).tolist():
                    self._tokens[req_id] = self._tokens.get(req_id, 0) + 1


class Question(msgspec.Struct, frozen=True):
    point: Point
    seed: list[int]


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, which is for answers
    try:
        runner = Runner(msgspec.json.decode(sys.stdin.readline(), type=EngineConfig))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(runner.about()), file=out, flush=True)
    for line in sys.stdin:
        question = msgspec.json.decode(line, type=Question)
        print(json.dumps({"tok_s": runner.ask(question.point, question.seed)}), file=out, flush=True)
    runner.engine.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's exit handlers may wait for idle threads
