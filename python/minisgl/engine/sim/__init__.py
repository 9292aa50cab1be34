"""An engine without a model: its tokens come from (request seed, position), its step times from a profile. It proves
nothing about the scheduler (engine/echo.py does), and nothing about a GPU that the profile does not assume.

Invariants: tokens do not depend on the batch, the chunks or the cache; `launch` never blocks; steps run one after the
other on one simulated device, so a step that is launched while another runs begins at its end; nothing in a step costs
Python per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minisgl.engine.api import EngineInfo, SlotAssignment, StepHandle, StepResult
from minisgl.engine.sim.clock import Clock, RealClock
from minisgl.engine.sim.profile import Profile, StepLoad
from minisgl.step import Int32Array, RingEntry, StepBuffers, StepPlan

U64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


class SimStep:
    """A step that ends at `end` of the clock."""

    __slots__ = ("_clock", "_end", "_result", "_start")

    def __init__(self, result: StepResult, clock: Clock, start: float, end: float) -> None:
        self._result = result
        self._clock = clock
        self._start = start
        self._end = end

    def wait(self) -> StepResult:
        self._clock.sleep_until(self._end)
        return self._result

    def done(self) -> bool:
        return self._clock.now() >= self._end

    def span(self) -> tuple[float, float]:
        return self._start, self._end


class SimEngine:
    """`alphabet` [m] int32 are the ids it generates. With `profile.eos_one_in` one token in so many is the first of
    `info.eos_ids`; otherwise it never ends a text by itself."""

    def __init__(
        self, info: EngineInfo, alphabet: Int32Array, max_rows: int, profile: Profile, clock: Clock | None = None
    ) -> None:
        self._info = info
        self._alphabet = alphabet
        self._profile = profile
        self._clock = clock or RealClock()
        self._busy_until = 0.0
        self.busy_s = 0.0
        """What the device has been given to do so far."""
        self._seeds: U64 = np.zeros(max_rows + 1, np.uint64)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def another(self, clock: Clock) -> SimEngine:
        """One like it, with a device and a clock of its own."""
        return SimEngine(self._info, self._alphabet, len(self._seeds) - 1, self._profile, clock)

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry = buffers.ring[plan.ring_index]
        for assignment in assignments:  # spread, so that neighbouring seeds give unlike texts
            self._seeds[assignment.slot] = ((assignment.sampling.seed or 0) * GOLDEN) & MASK
        start = end = self._clock.now()
        if self._profile.takes_time and plan.num_rows:
            start = max(start, self._busy_until)
            seconds = self._profile.seconds(_load(plan, entry))
            end = self._busy_until = start + seconds
            self.busy_s += seconds
        return SimStep(StepResult(self._tokens(plan, entry)), self._clock, start, end)

    def close(self) -> None:
        pass

    def _tokens(self, plan: StepPlan, entry: RingEntry) -> Int32Array:
        """Two multiplications and a shift (after Stafford's variant of the splitmix64 finalizer) pick a word."""
        rows = entry.sample_rows[: plan.num_samples]
        state = self._seeds[entry.req_slots[rows]]
        state ^= entry.seq_lens[rows].astype(np.uint64)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state >>= np.uint64(33)
        picked = self._alphabet[(state % np.uint64(len(self._alphabet))).astype(np.intp)]
        if one_in := self._profile.eos_one_in:
            picked[(state >> np.uint64(12)) % np.uint64(one_in) == 0] = self._info.eos_ids[0]
        if plan.num_samples == plan.num_rows:
            return picked
        tokens = np.full(plan.num_rows, -1, np.int32)
        tokens[rows] = picked
        return tokens


def _load(plan: StepPlan, entry: RingEntry) -> StepLoad:
    rows = plan.num_rows
    if plan.num_tokens == rows:
        kv_tokens = int(entry.seq_lens[:rows].sum(dtype=np.int64))
        return StepLoad(rows, rows, plan.num_samples, kv_tokens, kv_tokens)
    lens = entry.seq_lens[:rows].astype(np.int64)
    new = entry.extend_lens[:rows].astype(np.int64)
    pairs = int(new @ lens) - int(new @ (new - 1)) // 2
    return StepLoad(rows, plan.num_tokens, plan.num_samples, int(lens.sum()), pairs)
