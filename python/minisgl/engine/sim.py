"""An engine without a model, for speed: its tokens come from (request seed, position) alone.

Keeps true: tokens do not depend on the batch, the chunks or the cache; `launch` never blocks; nothing in a step costs
Python per row.
Doesn't know: tensors, KV, text. It proves nothing about the control plane (engine/echo.py does).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minisgl.engine.api import EngineInfo, SlotBinding, StepHandle, StepResult
from minisgl.step import Int32Array, RingEntry, StepBuffers, StepPlan

U64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1


class _Done:
    """A step that took no time."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result

    def done(self) -> bool:
        return True


class SimEngine:
    """`alphabet` [m] int32 are the ids it generates."""

    def __init__(self, info: EngineInfo, alphabet: Int32Array, max_rows: int) -> None:
        self._info = info
        self._alphabet = alphabet
        self._seeds: U64 = np.zeros(max_rows + 1, np.uint64)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan, buffers: StepBuffers, bindings: Sequence[SlotBinding]) -> StepHandle:
        entry = buffers.ring[plan.ring_index]
        for binding in bindings:
            self._seeds[binding.slot] = (binding.sampling.seed or 0) & MASK
        return _Done(StepResult(self._tokens(plan, entry)))

    def close(self) -> None:
        pass

    def _tokens(self, plan: StepPlan, entry: RingEntry) -> Int32Array:
        """A multiplicative hash of seed and position (Fibonacci hashing, Knuth 6.4) picks from the alphabet."""
        rows = entry.sample_rows[: plan.num_samples]
        state = self._seeds[entry.req_slots[rows]] + entry.seq_lens[rows].astype(np.uint64)
        state *= np.uint64(0x9E3779B97F4A7C15)
        state >>= np.uint64(33)
        picked = self._alphabet[(state % np.uint64(len(self._alphabet))).astype(np.intp)]
        if plan.num_samples == plan.num_rows:
            return picked
        tokens = np.full(plan.num_rows, -1, np.int32)
        tokens[rows] = picked
        return tokens
