"""A trace through the step loop on a clock that is only counted: the server's own loop and scheduler, a simulated
engine, no sockets, no text.

Invariants: the same job gives the same result, whatever the machine and its load. Latencies count from the arrival in
the trace; nothing is left out: a request that does not fit is counted as refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from minisgl.bench.traces import TraceRequest, prompt_tokens
from minisgl.config import EngineConfig
from minisgl.engine.sim import SimEngine, VirtualClock, build_sim
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane, build_step_time
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop, Timing
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import Stats
from minisgl.step import FinishReason, Int64Array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What one engine did. `num_tokens`: generated."""

    num_requests: int
    num_tokens: int
    num_steps: int
    num_rows: int
    busy_s: float  # of the device
    stats: Stats

    @property
    def num_computed(self) -> int:
        """Tokens of prompts that were not cached, and of answers."""
        return self.stats.num_prompt_tokens_total - self.stats.num_cached_tokens_total + self.num_tokens


@dataclass(slots=True, eq=False)
class VirtualRun:
    """Arrays by request, written while the run goes on; times in virtual seconds since the first arrival, NaN where
    there was none. The rest is known when it has `ended`."""

    first_token_s: Floats
    last_token_s: Floats
    longest_gap_s: Floats  # between two tokens; 0: it has one alone
    num_tokens: Int64Array  # generated
    refused: npt.NDArray[np.bool_]
    arrival_s: Floats = field(init=False)
    num_prompt: Int64Array = field(init=False)
    end_s: float = field(init=False)
    engines: tuple[EngineTotals, ...] = field(init=False)

    @classmethod
    def of(cls, num: int) -> VirtualRun:
        """Before it begins, of so many requests."""
        first, last = np.full((2, num), np.nan)
        return cls(first, last, np.zeros(num), np.zeros(num, np.int64), np.zeros(num, np.bool_))

    def ended(self, trace: Sequence[TraceRequest], arrivals_s: Floats, engines: Sequence[VirtualEngine]) -> VirtualRun:
        self.arrival_s, self.num_prompt = arrivals_s, np.array([one.input_len for one in trace], np.int64)
        self.end_s = max(engine.clock.now() for engine in engines)
        self.engines = tuple(engine.totals() for engine in engines)
        return self


class VirtualEngine:
    """A step loop with a simulated engine and a clock of its own. `host_s`: what the loop itself takes for each step,
    in virtual time."""

    def __init__(self, config: EngineConfig, sim: SimEngine, clock: VirtualClock, run: VirtualRun, host_s: float):
        self.clock = clock
        self._sim = sim
        self._host_s = host_s
        self._plane = build_control_plane(config, sim.info)
        step_time = build_step_time(config, sim.info)
        self._loop = StepLoop(
            self._plane,
            sim,
            self._take,
            settings=LoopSettings(overlap=config.overlap),
            timing=Timing(step_time=step_time),
        )
        self._run = run
        self._num_requests = 0
        self._num_tokens = 0
        self.num_live = 0
        self.ended: list[int] = []
        """Requests, since whoever reads it emptied it last."""

    def step(self, messages: Sequence[AddRequest]) -> None:
        self.num_live += len(messages)
        self._num_requests += len(messages)
        self.clock.sleep_until(self.clock.now() + self._host_s)
        self._loop.step(messages)

    def drain(self) -> None:
        """Until nothing is in flight."""
        while not self._loop.idle:
            self._loop.step(())

    def totals(self) -> EngineTotals:
        return EngineTotals(
            num_requests=self._num_requests,
            num_tokens=self._num_tokens,
            num_steps=self._loop.num_steps,
            num_rows=self._loop.timers.num_rows,
            busy_s=self._sim.busy_s,
            stats=self._plane.stats(),
        )

    def _take(self, messages: Sequence[FromEngine]) -> None:
        now, run = self.clock.now(), self._run
        for message in messages:
            if not isinstance(message, StepTokens) or not message.req_ids:
                continue
            ids = np.frombuffer(message.req_ids, np.int64)
            reasons = np.frombuffer(message.reasons, np.int32)
            self.ended.extend(ids[reasons != FinishReason.NONE].tolist())
            self.num_live -= int(np.count_nonzero(reasons))
            run.refused[ids[reasons == FinishReason.ERROR]] = True
            ids = ids[np.frombuffer(message.tokens, np.int32) >= 0]
            run.first_token_s[ids[run.num_tokens[ids] == 0]] = now
            run.longest_gap_s[ids] = np.fmax(
                run.longest_gap_s[ids], now - run.last_token_s[ids]
            )  # NaN before the first
            run.last_token_s[ids] = now
            run.num_tokens[ids] += 1
            self._num_tokens += len(ids)


def build_virtual(config: EngineConfig) -> tuple[SimEngine, VirtualClock]:
    """A simulated engine and its clock."""
    clock = VirtualClock()
    return build_sim(config, lambda *report: None, clock), clock


def request_message(one: TraceRequest, req_id: int, vocab_size: int, seed: int) -> AddRequest:
    sampling = SamplingParams(max_tokens=one.output_len, seed=req_id, ignore_eos=True)
    return AddRequest(req_id, prompt_tokens(one, req_id, vocab_size, seed).tobytes(), sampling)


class VirtualServer:
    """One engine; `around`: what stands in for it."""

    def __init__(
        self,
        config: EngineConfig,
        num_requests: int,
        host_s: float = 0.0,
        around: Callable[[SimEngine], SimEngine] = lambda sim: sim,
    ) -> None:
        self._run = VirtualRun.of(num_requests)
        sim, clock = build_virtual(config)
        sim = around(sim)
        self._vocab_size = sim.info.vocab_size
        self._engine = VirtualEngine(config, sim, clock, self._run, host_s)

    def run(
        self, trace: Sequence[TraceRequest], arrivals_s: Floats, seed: int, concurrency: int | None = None
    ) -> VirtualRun:
        """Request i arrives at `arrivals_s[i]`, ascending. With `concurrency`, as soon as fewer than so many live;
        `arrivals_s` then becomes when that was."""
        at, engine, clock = 0, self._engine, self._engine.clock
        while at < len(trace) or engine.num_live:
            if not engine.num_live:
                engine.drain()
                clock.sleep_until(0.0 if concurrency else float(arrivals_s[at]))
            if concurrency:
                due = min(at + concurrency - engine.num_live, len(trace))
                arrivals_s[at:due] = clock.now()
            else:
                due = int(np.searchsorted(arrivals_s, clock.now(), "right"))
            messages = [request_message(trace[i], i, self._vocab_size, seed) for i in range(at, due)]
            at = max(at, due)
            engine.step(messages)
        engine.drain()
        return self._run.ended(trace, arrivals_s, [engine])
