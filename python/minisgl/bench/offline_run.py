"""A measured run of the step loop in its own process: `python -m minisgl.bench.offline_run`.

It reads an `OfflineJob` as JSON from stdin and prints the result as one JSON line. All sequences start at once; the
step loop, scheduler and engine are the server's, without text and sockets.
Invariants: the same job gives the same prompts, lengths and (on an exact engine) tokens; loading and a short warm-up
are not timed; the four timed parts and `other` add up to the wall time.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import psutil

from minisgl.config import ConfigError, EngineConfig
from minisgl.message import AddRequest, FromEngine, MeterReading, StepTokens, ToEngine
from minisgl.metrics.meters import percentiles
from minisgl.metrics.steps import StepTimers
from minisgl.runner.build import build_control_plane, build_engine, build_step_time
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop, Timing
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array

PARTS = ("schedule", "launch", "wait", "commit")
WARM_UP_LEN = 16


class OfflineJob(msgspec.Struct, frozen=True, kw_only=True):
    """The workload of one run of `bench offline`. Lengths are in tokens, uniform in the closed ranges."""

    engine: EngineConfig
    num_sequences: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int = 0

    def lengths(self) -> tuple[Int32Array, Int32Array]:
        """Return the lengths of the prompts and of the answers, both [num_sequences] int32."""
        rng = np.random.default_rng(self.seed)
        low_in, high_in = self.input_len
        low_out, high_out = self.output_len
        return (
            rng.integers(low_in, high_in, self.num_sequences, np.int32, endpoint=True),
            rng.integers(low_out, high_out, self.num_sequences, np.int32, endpoint=True),
        )

    def requests(self, vocab_size: int) -> list[AddRequest]:
        input_lens, output_lens = (lens.tolist() for lens in self.lengths())
        rng = np.random.default_rng([self.seed, 1])
        prompts = [rng.integers(0, vocab_size, length, np.int32) for length in input_lens]
        return [
            AddRequest(i, prompt.tobytes(), _sampling(max_tokens, i))
            for i, (prompt, max_tokens) in enumerate(zip(prompts, output_lens, strict=True))
        ]


def _sampling(max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=seed, ignore_eos=True)


class Collector:
    """A collector of the step loop's messages, which are read after the run."""

    def __init__(self) -> None:
        self.steps: list[StepTokens] = []

    def __call__(self, messages: Sequence[FromEngine]) -> None:
        self.steps += [message for message in messages if isinstance(message, StepTokens)]

    def drive(self, loop: StepLoop, requests: Sequence[ToEngine]) -> None:
        self.steps.clear()
        loop.step(requests)
        while not loop.idle:
            loop.step([])

    def tokens(self, num_sequences: int) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in range(num_sequences)]
        for step in self.steps:
            ids = np.frombuffer(step.req_ids, np.int64).tolist()
            tokens = np.frombuffer(step.tokens, np.int32).tolist()
            reasons = np.frombuffer(step.reasons, np.int32).tolist()
            for req_id, token, reason in zip(ids, tokens, reasons, strict=True):
                if reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise ConfigError(f"a sequence failed: {step.errors.get(req_id, FinishReason(reason).name)}")
                answers[req_id].append(token)
        return answers


def run_job(job: OfflineJob) -> dict[str, Any]:
    """Load the engine, warm up, run the job, and return the figures. Raises `ConfigError`."""
    began = time.perf_counter()
    engine = build_engine(job.engine, lambda *report: None)
    try:
        plane = build_control_plane(job.engine, engine.info)
        collector = Collector()
        step_time = build_step_time(job.engine, engine.info)
        loop = StepLoop(
            plane,
            engine,
            collector,
            settings=LoopSettings(overlap=job.engine.overlap),
            timing=Timing(step_time=step_time),
        )
        requests = job.requests(engine.info.vocab_size)
        load_s = time.perf_counter() - began
        _warm_up(job, loop, collector)
        gc.collect()
        gc.freeze()
        first_step = loop.num_steps
        loop.timers.meters.reset()
        cpu, began = time.process_time(), time.perf_counter()
        loop.timers.begin()
        collector.drive(loop, requests)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        stats = plane.stats()
        answers = collector.tokens(job.num_sequences)
    finally:
        engine.close()
    return {
        "load_s": load_s,
        "num_steps": loop.num_steps - first_step,
        "num_retracted": stats.num_retracted_total,
        **_throughput(job, answers, wall_s),
        "cpu_s": cpu_s,
        **breakdown(loop.timers, wall_s),
        "max_rss_mib": psutil.Process().memory_info().rss / 2**20,
        "tokens_sha256": hashlib.sha256(msgspec.json.encode(answers)).hexdigest(),
    }


def _warm_up(job: OfflineJob, loop: StepLoop, collector: Collector) -> None:
    """Generate a few short answers, so that kernels are chosen and memory is touched."""
    first_id = job.num_sequences
    prompts = [np.full(WARM_UP_LEN, i, np.int32) for i in range(4)]
    collector.drive(
        loop, [AddRequest(first_id + i, prompt.tobytes(), _sampling(8, i)) for i, prompt in enumerate(prompts)]
    )


def _throughput(job: OfflineJob, answers: Sequence[Sequence[int]], wall_s: float) -> dict[str, Any]:
    input_lens, output_lens = job.lengths()
    num_output = sum(map(len, answers))
    if num_output != int(output_lens.sum()):  # all counted tokens must exist
        raise ConfigError(f"{num_output} tokens arrived instead of {output_lens.sum()}: a sequence ended early")
    num_input = int(input_lens.sum())
    return {
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "wall_s": wall_s,
        "output_tok_s": num_output / wall_s,
        "total_tok_s": (num_input + num_output) / wall_s,
    }


def breakdown(timers: StepTimers, wall_s: float) -> dict[str, Any]:
    """Return how `wall_s` seconds of a loop divide into parts; percentiles are right within 7 %."""
    readings = {part: timers.meters[part].reading() for part in PARTS}
    seconds = {part: reading.total_s for part, reading in readings.items()}
    return {
        "seconds": {**seconds, "other": wall_s - sum(seconds.values())},
        "step_us": {part: _us(reading) for part, reading in readings.items()},
        "scheduler_step_us": 1e6 * (seconds["schedule"] + seconds["commit"]) / readings["commit"].count,
    }


def _us(reading: MeterReading) -> dict[str, float]:
    spread = percentiles(reading.spread, reading.longest_s)
    return {
        "mean": 1e6 * reading.total_s / reading.count,
        **{name.removesuffix("_s"): 1e6 * value for name, value in spread.items()},
        "max": 1e6 * reading.longest_s,
    }


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=OfflineJob)
    try:
        result = run_job(job)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
