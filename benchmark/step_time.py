"""What a long prompt does to those who decode, with a step's time bounded (`--max-step-ms`) and without, in turns on
one loaded engine: `python -m benchmark.step_time FOLDER --prompt 8000 --step-ms 0 250`.

FOLDER holds a config.json; weights are random. A line of JSON a run: the gaps between tokens of the streams while the
prompt is computed, its time to the first token, and that of the same prompt alone. With `--cpu-clock` times are the CPU
time of the process over its threads, for a machine that computes other things, too; with `--costs A B C` nothing is
computed: a step takes A seconds, B for each token, C for each token that each of these looks back at.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from minisgl.config import EngineConfig
from minisgl.engine.api import Engine, EngineInfo, SlotAssignment, StepHandle, StepResult
from minisgl.engine.sim import SimEngine, VirtualClock
from minisgl.engine.sim.profile import Profile, StepLoad
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane, build_engine, build_step_time
from minisgl.runner.loop import StepLoop, Timing
from minisgl.sampling_params import SamplingParams
from minisgl.step import StepBuffers, StepPlan

WARM_TOKENS = 4  # of each stream, before the prompt comes
ENDLESS = 1500  # more, and the scheduler would keep so much of the pool for them that the prompt waits
Clock = Callable[[], float]


class Costs(msgspec.Struct, frozen=True):
    """What `SimEngine` asks of a profile."""

    step: float
    token: float
    pair: float
    takes_time: bool = True
    eos_one_in: int = 0

    def seconds(self, load: StepLoad) -> float:
        return self.step + self.token * load.tokens + self.pair * load.pairs


class Computed:
    """A step that was waited for."""

    def __init__(self, result: StepResult, span: tuple[float, float]) -> None:
        self._result = result
        self._span = span

    def wait(self) -> StepResult:
        return self._result

    def done(self) -> bool:
        return True

    def span(self) -> tuple[float, float]:
        return self._span


class Clocked:
    """`engine` with its steps measured by `clock`, one after the other."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self.info = engine.info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        began = self._clock()
        result = self._engine.launch(plan, buffers, assignments).wait()
        return Computed(result, (began, self._clock()))

    def close(self) -> None:
        self._engine.close()


class Run:
    """A fresh scheduler on a loaded engine, and when each request got its tokens."""

    def __init__(self, config: EngineConfig, engine: Engine, clock: Clock) -> None:
        plane, step_time = build_control_plane(config, engine.info), build_step_time(config, engine.info)
        self.loop = StepLoop(plane, engine, self._take, timing=Timing(step_time=step_time))
        self.times: dict[int, list[float]] = {}
        self._clock = clock
        self._rng = np.random.default_rng(0)

    def _take(self, messages: Sequence[FromEngine]) -> None:
        now = self._clock()
        for message in messages:
            assert isinstance(message, StepTokens) and not message.errors, message
            for req_id in np.frombuffer(message.req_ids, np.int64).tolist():
                self.times.setdefault(req_id, []).append(now)

    def request(self, req_id: int, length: int, max_tokens: int = ENDLESS) -> AddRequest:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, seed=0, ignore_eos=True)
        return AddRequest(req_id, self._rng.integers(5, 100_000, length, dtype=np.int32).tobytes(), sampling)

    def until(self, req_id: int, count: int) -> None:
        while len(self.times.get(req_id, ())) < count:
            self.loop.step(())


def measure(config: EngineConfig, engine: Engine, clock: Clock, num_streams: int, length: int) -> dict[str, object]:
    run = Run(config, engine, clock)
    run.loop.step([run.request(i, 32) for i in range(num_streams)])
    for i in range(num_streams):
        run.until(i, WARM_TOKENS)
    began, first_step = clock(), run.loop.num_steps
    run.loop.step([run.request(num_streams, length, 1)])
    run.until(num_streams, 1)
    gaps = [np.diff(run.times[i][sum(at < began for at in run.times[i]) - 1 :]) for i in range(num_streams)]
    all_gaps = np.concatenate([*gaps, [0.0]])
    return {
        "max_step_ms": config.max_step_ms,
        "streams": num_streams,
        "prompt": length,
        "steps": run.loop.num_steps - first_step,
        "ttft_s": round(clock() - began, 3),
        "itl_p50_s": round(float(np.percentile(all_gaps, 50)), 3),
        "itl_p99_s": round(float(np.percentile(all_gaps, 99)), 3),
        "itl_max_s": round(float(all_gaps.max()), 3),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 0])
    parser.add_argument("--step-ms", type=int, nargs="+", default=[0, 250])
    parser.add_argument("--quantization", choices=("q8", "q4"))
    parser.add_argument("--activations", default="exact")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cpu-clock", action="store_true")
    parser.add_argument("--costs", type=float, nargs=3)
    args = parser.parse_args()
    config = EngineConfig(
        model=str(args.folder),
        engine="cpu",
        load_format="dummy",
        quantization=args.quantization,
        activations=args.activations,
        num_pages=1024,
    )
    clock: Clock = time.perf_counter
    if args.costs:
        virtual = VirtualClock()
        clock = virtual.now
        info = EngineInfo("sim", None, 100_000, 32_768, (), 1024, 16, "simulated", "none", "costs")
        profile = cast(Profile, Costs(*args.costs))
        engine: Engine = SimEngine(info, np.arange(5, 100, dtype=np.int32), config.rows_on("cpu"), profile, virtual)
    else:
        engine = build_engine(config, lambda *report: None)
    if args.cpu_clock:
        threads = len(os.sched_getaffinity(0))
        clock = lambda: time.process_time() / threads  # noqa: E731
        engine = Clocked(engine, clock)
    for _ in range(args.rounds):
        for num_streams in args.streams:
            for step_ms in args.step_ms:
                ours = msgspec.structs.replace(config, max_step_ms=step_ms)
                print(json.dumps(measure(ours, engine, clock, num_streams, args.prompt)), flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
