"""Record each step of a torch engine for a benchmark, and compute figures from the records.

Nothing is added to what the engine records by itself; device times are read when all steps are done; a step's idle time
is only the time between the end of the previous forward and its own start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from minisgl.engine.api import EngineInfo, SlotAssignment, StepHandle
from minisgl.engine.sim.profile import StepLoad
from minisgl.engine.torch_engine import TorchEngine
from minisgl.step import StepBuffers, StepPlan

BYTES_PER_S = 4.3e12  # memory bandwidth of an H200 by copies; used where there is no device to measure
_COPIED = 2**30
DECODE, MIXED, PREFILL = "decode", "mixed", "prefill"


@dataclass(slots=True)
class Step:
    """Launched step with at least one row."""

    handle: Any
    kind: str
    load: StepLoad
    launch_s: float

    @property
    def computing_s(self) -> float:
        return float(self.handle.computed.seconds_since(self.handle.start))

    def idle_s(self, before: Step) -> float:
        return max(0.0, float(self.handle.start.seconds_since(before.handle.computed)))


def load_of(plan: StepPlan, buffers: StepBuffers) -> StepLoad:
    entry = buffers.ring[plan.ring_index]
    lens = entry.seq_lens[: plan.num_rows].astype(np.int64)
    new = entry.extend_lens[: plan.num_rows].astype(np.int64)
    pairs = int((new * (2 * lens - new + 1) // 2).sum())
    return StepLoad(plan.num_rows, plan.num_tokens, plan.num_samples, int(lens.sum()), pairs)


def kind_of(plan: StepPlan) -> str:
    if plan.num_tokens == plan.num_rows:
        return DECODE
    return MIXED if plan.num_decode_rows else PREFILL


class Watched:
    """Engine that records each of its steps."""

    def __init__(self, engine: TorchEngine) -> None:
        self.info: EngineInfo = engine.info
        self.engine = engine
        self.steps: list[Step] = []

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        load = load_of(plan, buffers)
        began = time.perf_counter()
        handle = self.engine.launch(plan, buffers, assignments)
        took = time.perf_counter() - began
        if plan.num_rows:
            self.steps.append(Step(handle, kind_of(plan), load, took))
        return handle

    def close(self) -> None:
        self.engine.close()


def copy_speed() -> float:
    """Return the bytes per second that a copy of 1 GiB on the device reads and writes: the median of ten."""
    source = torch.randint(256, (_COPIED,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source)
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return 2 * _COPIED / statistics.median(seconds[2:])


# ---------------------------------------------------------------------------------------------------------- figures


def decode_figures(
    steps: Sequence[Step], weight_bytes: int, token_bytes: int, bytes_per_s: float = BYTES_PER_S
) -> dict[str, Any]:
    """Return figures over pairs of consecutive decode steps: share of idle time, and ratio to a roofline."""
    pairs = [(a, b) for a, b in pairwise(steps) if a.kind == b.kind == DECODE]
    most = max((step.load.rows for step in steps), default=0)
    full = [(a, b) for a, b in pairs if b.load.rows >= 0.9 * most]
    least = sum((weight_bytes + b.load.kv_tokens * token_bytes) / bytes_per_s for _, b in pairs)
    busy, idle = sum(b.computing_s for _, b in pairs), sum(b.idle_s(a) for a, b in pairs)
    return {
        "decode_pairs": len(pairs),
        "idle_share": idle / (busy + idle) if busy else None,
        "roofline_ratio": least / (busy + idle) if busy else None,
        "full_batch": _at_full_batch(full, most),
    }


def _at_full_batch(full: Sequence[tuple[Step, Step]], most: int) -> dict[str, Any]:
    """Return the figures, in milliseconds, of pairs with at least nine tenths of `most` rows, the fullest step's."""
    if not full:
        return {"rows": most, "pairs": 0}
    gaps = [1e3 * b.idle_s(a) for a, b in full]
    computing = [1e3 * b.computing_s for _, b in full]
    return {
        "rows": most,
        "pairs": len(full),
        "idle_share": sum(gaps) / (sum(gaps) + sum(computing)) if sum(computing) else None,
        "idle_ms_mean": statistics.fmean(gaps),
        **_upper("idle_ms", gaps),
        "step_ms_median": statistics.median(computing),
        "launch_ms_median": statistics.median(1e3 * b.launch_s for _, b in full),
        **_upper("launch_ms", [1e3 * b.launch_s for _, b in full]),
    }


def _upper(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{share}": float(np.percentile(values, share)) for share in (90, 95, 99)}


def by_kind(steps: Sequence[Step]) -> dict[str, dict[str, Any]]:
    """Return the figures of decode, mixed and prefill steps separately."""
    figures = {}
    for kind in (DECODE, MIXED, PREFILL):
        of_kind = [step for step in steps if step.kind == kind]
        if of_kind:
            ms = [1e3 * step.computing_s for step in of_kind]
            launches = [1e3 * step.launch_s for step in of_kind]
            figures[kind] = {
                "steps": len(of_kind),
                "tokens": sum(step.load.tokens for step in of_kind),
                "device_s": sum(ms) / 1e3,
                "step_ms_median": statistics.median(ms),
                **_upper("step_ms", ms),
                "launch_ms_median": statistics.median(launches),
            }
    return figures


def points(steps: Sequence[Step]) -> list[list[float]]:
    """Return [rows, tokens, samples, KV tokens, pairs, milliseconds] of each step, in the order of `StepLoad`, from
    which profiles of the simulated engine are made."""
    return [[*step.load, round(1e3 * step.computing_s, 4)] for step in steps]
