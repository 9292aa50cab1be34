"""Step loop over a simulated engine on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.engine.api import EngineInfo
from minisgl.engine.sim import SimEngine, VirtualClock
from minisgl.engine.sim.profile import Profile, Table
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.metrics.steps import StepTimers
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop, Timing
from minisgl.runner.step_time import StepTime
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import FinishReason

ALPHABET = tuple(range(100, 160))
EOS = 7
NULL = Profile(name="null")


def constant(ms: float, **more: object) -> Profile:
    """Return a profile in which every step takes `ms` milliseconds."""
    table = Table(rows=(1,), prefill_tokens=(0,), kv_len=(1,), ms=(((ms,),),))
    return Profile(name="constant", table=table, **more)  # type: ignore[arg-type]


class Sim:
    """Simulated run: the output of each request, with its times."""

    def __init__(
        self,
        profile: Profile = NULL,
        *,
        plane: str = "python",
        max_rows: int = 8,
        budget: int = 64,
        num_pages: int = 2048,
        overlap: bool = True,
        step_time: StepTime | None = None,
        timers: StepTimers | None = None,
    ) -> None:
        eos_ids = (EOS,) if profile.eos_one_in else ()
        info = EngineInfo("sim", None, 1_000_000, 4096, eos_ids, num_pages, 4, "simulated", "none", profile.name)
        config = ControlPlaneConfig(num_pages, 4, max_rows, budget, 4096, eos_ids)
        self.clock = VirtualClock()
        self.engine = SimEngine(info, np.array(ALPHABET, np.int32), max_rows, profile, self.clock)
        chosen = make_control_plane(plane, config)
        timing = Timing(timers=timers or StepTimers(), step_time=step_time)
        self.loop = StepLoop(chosen, self.engine, self._take, settings=LoopSettings(overlap=overlap), timing=timing)
        self.tokens: dict[int, list[int]] = {}
        self.times: dict[int, list[float]] = {}
        self.reasons: dict[int, FinishReason] = {}

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            assert isinstance(message, StepTokens)
            ids, tokens, reasons = (
                np.frombuffer(raw, kind).tolist()
                for raw, kind in ((message.req_ids, np.int64), (message.tokens, np.int32), (message.reasons, np.int32))
            )
            for req_id, token, reason in zip(ids, tokens, reasons, strict=True):
                if token >= 0:
                    self.tokens.setdefault(req_id, []).append(token)
                    self.times.setdefault(req_id, []).append(self.clock.now())
                if reason:
                    self.reasons[req_id] = FinishReason(reason)

    def run(self, requests: Sequence[AddRequest]) -> Sim:
        """Submit all requests at once, and run until all have ended."""
        self.loop.step(requests)
        while not self.loop.idle:
            self.loop.step(())
        return self


def request(req_id: int, length: int, max_tokens: int, seed: int = 0, **more: object) -> AddRequest:
    prompt = np.arange(length, dtype=np.int32) + 1000 * req_id
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **more)  # type: ignore[arg-type]
    return AddRequest(req_id, prompt.tobytes(), sampling)
