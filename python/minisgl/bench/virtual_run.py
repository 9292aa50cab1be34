"""A trace through the step loop on a clock that is only counted: the server's own loop and scheduler, a simulated
engine, no sockets, no text.

Keeps true: the same job gives the same result, whatever the machine and its load. Latencies count from the arrival in
the trace; nothing is left out: a request that does not fit is counted as refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.bench.traces import TraceRequest, prompt_tokens
from minisgl.config import EngineConfig
from minisgl.engine.sim.build import build_sim
from minisgl.engine.sim.clock import VirtualClock
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import Stats
from minisgl.step import FinishReason, Int64Array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class VirtualRun:
    """Arrays by request, times in virtual seconds since the first arrival; NaN where there was none."""

    arrival_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    num_tokens: Int64Array  # generated
    num_prompt: Int64Array
    refused: npt.NDArray[np.bool_]
    end_s: float
    num_steps: int
    num_rows: int
    busy_s: float  # of the device
    stats: Stats


class VirtualServer:
    """`host_s`: what the step loop itself takes for each step, in virtual time."""

    def __init__(self, config: EngineConfig, num_requests: int, host_s: float = 0.0) -> None:
        self._clock = VirtualClock()
        self._host_s = host_s
        self._engine = build_sim(config, lambda *report: None, self._clock)
        self._plane = build_control_plane(config, self._engine.info)
        self._loop = StepLoop(self._plane, self._engine, self._take, overlap=config.overlap)
        self._first: Floats = np.full(num_requests, np.nan)
        self._last: Floats = np.full(num_requests, np.nan)
        self._counts: Int64Array = np.zeros(num_requests, np.int64)
        self._refused = np.zeros(num_requests, np.bool_)
        self._live = 0

    @property
    def vocab_size(self) -> int:
        return self._engine.info.vocab_size

    def run(
        self, trace: Sequence[TraceRequest], arrivals_s: Floats, seed: int, concurrency: int | None = None
    ) -> VirtualRun:
        """Request i arrives at `arrivals_s[i]`, ascending. With `concurrency`, as soon as fewer than so many live;
        `arrivals_s` then becomes when that was."""
        at, clock = 0, self._clock
        while at < len(trace) or self._live:
            if not self._live:
                while not self._loop.idle:
                    self._loop.step(())
                clock.sleep_until(0.0 if concurrency else float(arrivals_s[at]))
            if concurrency:
                due = min(at + concurrency - self._live, len(trace))
                arrivals_s[at:due] = clock.now()
            else:
                due = int(np.searchsorted(arrivals_s, clock.now(), "right"))
            messages = [self._request(trace[i], i, seed) for i in range(at, due)]
            self._live += len(messages)
            at = max(at, due)
            clock.sleep_until(clock.now() + self._host_s)
            self._loop.step(messages)
        while not self._loop.idle:
            self._loop.step(())
        timers = self._loop.timers
        return VirtualRun(
            arrival_s=arrivals_s,
            first_token_s=self._first,
            last_token_s=self._last,
            num_tokens=self._counts,
            num_prompt=np.array([one.input_len for one in trace], np.int64),
            refused=self._refused,
            end_s=clock.now(),
            num_steps=self._loop.num_steps,
            num_rows=timers.num_rows,
            busy_s=self._engine.busy_s,
            stats=self._plane.stats(),
        )

    def _request(self, one: TraceRequest, req_id: int, seed: int) -> AddRequest:
        sampling = SamplingParams(max_tokens=one.output_len, seed=req_id, ignore_eos=True)
        return AddRequest(req_id, prompt_tokens(one, req_id, self.vocab_size, seed).tobytes(), sampling)

    def _take(self, messages: Sequence[FromEngine]) -> None:
        now = self._clock.now()
        for message in messages:
            if not isinstance(message, StepTokens) or not message.req_ids:
                continue
            ids = np.frombuffer(message.req_ids, np.int64)
            reasons = np.frombuffer(message.reasons, np.int32)
            self._live -= int(np.count_nonzero(reasons))
            self._refused[ids[reasons == FinishReason.ERROR]] = True
            ids = ids[np.frombuffer(message.tokens, np.int32) >= 0]
            self._first[ids[self._counts[ids] == 0]] = now
            self._last[ids] = now
            self._counts[ids] += 1
