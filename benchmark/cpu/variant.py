"""One engine of ours under measurement, in a process of its own: `python -m benchmark.cpu.variant`.

The first line of its standard input is an `EngineConfig` as JSON, each further one a question; every line is answered
by one. It sleeps while others are asked. What runs is the server's step loop, scheduler and engine.

All prompts differ, so no cache of prefixes helps; loading is outside the figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import psutil

from minisgl.config import ConfigError, EngineConfig
from minisgl.message import AddRequest, FromEngine, StepTokens, ToEngine
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array

FIRST_ID = 5  # ids below are often special
WARM_STEPS = 3  # of a row of decode steps, not counted: the pipeline of steps fills


class Failed(Exception):
    """A sequence ended otherwise than it was asked to."""


class Runner:
    """The loop and when each token came."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = build_engine(config, lambda text, done=0, total=0: None)
        self._loop = StepLoop(
            build_control_plane(config, self._engine.info), self._engine, self._take, overlap=config.overlap
        )
        self.info = self._engine.info
        self._next_id = 0
        self._firsts: set[int] = set()
        self._tokens: dict[int, list[int]] = {}

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, StepTokens):
                ids = np.frombuffer(message.req_ids, np.int64).tolist()
                reasons = np.frombuffer(message.reasons, np.int32).tolist()
                if any(reason in (FinishReason.ERROR, FinishReason.ABORT) for reason in reasons):
                    raise Failed(str(message.errors or reasons))
                for req_id, token in zip(ids, np.frombuffer(message.tokens, np.int32).tolist(), strict=True):
                    self._tokens.setdefault(req_id, []).append(token)

    def _requests(self, prompts: Sequence[Int32Array], num_out: int) -> list[ToEngine]:
        sampling = SamplingParams(temperature=0, max_tokens=num_out, seed=0, ignore_eos=True)
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        return [AddRequest(first + i, prompt.tobytes(), sampling) for i, prompt in enumerate(prompts)]

    def prompts(self, count: int, length: int, seed: Sequence[int]) -> list[Int32Array]:
        generator = np.random.default_rng(list(seed))
        vocab = self.info.vocab_size
        return [generator.integers(FIRST_ID, vocab, length, dtype=np.int32) for _ in range(count)]

    def decode(self, batch: int, num_in: int, num_out: int, seed: Sequence[int]) -> dict[str, Any]:
        """Prefill until every sequence has a token, then the rest: tokens per second of each part. `step_ms`: from a
        step's tokens to the next one's, where both gave every sequence one; the median, since a token that was told
        late makes one of these times long and the next one short."""
        prompts = self.prompts(batch, num_in, seed)
        self._tokens.clear()
        clock = time.perf_counter
        began, cpu = clock(), time.process_time()
        self._loop.step(self._requests(prompts, num_out))
        while len(self._tokens) < batch:
            self._loop.step([])
        first, done, cpu_first = clock(), self._count(), time.process_time()
        times, whole, count = [first], [False], done
        while not self._loop.idle:
            self._loop.step([])
            times.append(clock())
            whole.append(self._count() - count == batch)
            count = self._count()
        if self._count() != batch * num_out:
            raise Failed(f"{self._count()} tokens instead of {batch * num_out}")
        took = times[-1] - first
        steps = np.diff(times)[np.logical_and(whole[:-1], whole[1:])][WARM_STEPS:]
        return {
            "decode_tok_s": (batch * num_out - done) / took if took > 0 else None,
            "prefill_tok_s": batch * num_in / (first - began),
            "decode_cpu_s": time.process_time() - cpu_first,
            "prefill_cpu_s": cpu_first - cpu,
            "step_ms": 1e3 * float(np.median(steps)) if len(steps) else None,
        }

    def prefill(self, length: int, seed: Sequence[int]) -> dict[str, Any]:
        """One prompt and one token."""
        prompts = self.prompts(1, length, seed)
        self._tokens.clear()
        began, cpu = time.perf_counter(), time.process_time()
        self._drive(self._requests(prompts, 1))
        took = time.perf_counter() - began
        return {"prefill_tok_s": length / took, "seconds": took, "prefill_cpu_s": time.process_time() - cpu}

    def generate(self, prompts: Sequence[Sequence[int]], num_out: int) -> list[list[int]]:
        """Greedy tokens of each prompt."""
        first = self._next_id
        self._tokens.clear()
        self._drive(self._requests([np.array(ids, np.int32) for ids in prompts], num_out))
        return [self._tokens[first + i] for i in range(len(prompts))]

    def _drive(self, requests: Sequence[ToEngine]) -> None:
        self._loop.step(requests)
        while not self._loop.idle:
            self._loop.step([])

    def _count(self) -> int:
        return sum(map(len, self._tokens.values()))

    def close(self) -> None:
        self._engine.close()


def answer(runner: Runner, question: dict[str, Any]) -> dict[str, Any]:
    what = question.pop("op")
    ops: dict[str, Callable[..., Any]] = {
        "decode": runner.decode,
        "prefill": runner.prefill,
        "generate": lambda **asked: {"tokens": runner.generate(**asked)},
    }
    return dict(ops[what](**question))


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    began = time.perf_counter()
    try:
        runner = Runner(msgspec.json.decode(sys.stdin.readline(), type=EngineConfig))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    ready = {
        "load_s": time.perf_counter() - began,
        "rss_mb": psutil.Process().memory_info().rss / 1e6,
        "dtype": runner.info.dtype,
        "context_len": runner.info.context_len,
        "torch": "torch" in sys.modules,
    }
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(runner, json.loads(line))), file=out, flush=True)
    runner.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's exit handlers may wait for threads that nobody needs any more
