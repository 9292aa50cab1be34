"""What a benchmark notes of each step of a CUDA engine, and the figures that follow.

Without `parts` nothing is added to what the engine records by itself; device times are read when all steps
are through; a step counts as idle time only what lies between the end of the forward before it and its own start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from minisgl.engine.api import EngineInfo, SlotAssignment, StepHandle
from minisgl.engine.cuda_engine import CudaEngine
from minisgl.engine.device_streams import Device, DeviceEvent, Stream
from minisgl.engine.sim.profile import StepLoad
from minisgl.step import StepBuffers, StepPlan

BYTES_PER_S = 4.3e12  # of an H200's memory, as reached by copies
DECODE, MIXED, PREFILL = "decode", "mixed", "prefill"
DEVICE_PARTS = ("copy in", "apply", "plan", "forward", "sample", "copy out")
HOST_PARTS = ("pack", "plan", "sample", "other")
Span = tuple[DeviceEvent, DeviceEvent, float]  # from, to, seconds of the host


@dataclass(slots=True)
class Step:
    """One launched step with rows."""

    handle: Any
    kind: str
    load: StepLoad
    launch_s: float
    parts: dict[str, Span] = field(default_factory=dict)

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
    """The engine, and what it did."""

    def __init__(self, engine: CudaEngine) -> None:
        self.info: EngineInfo = engine.info
        self.engine = engine
        self.steps: list[Step] = []
        self.parts: Parts | None = None

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        load = load_of(plan, buffers)
        if self.parts is not None:
            self.parts.of_step = {}
        began = time.perf_counter()
        handle = self.engine.launch(plan, buffers, assignments)
        took = time.perf_counter() - began
        if plan.num_rows:
            spans = self.parts.of_step if self.parts is not None else {}
            self.steps.append(Step(handle, kind_of(plan), load, took, spans))
        return handle

    def close(self) -> None:
        self.engine.close()


class Parts:
    """Events between the parts of each step, while in a `with`: a dozen events a step, so such a run is not one for
    throughput."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.of_step: dict[str, Span] = {}

    def __enter__(self) -> None:
        engine: Any = self._watched.engine
        device = engine._device
        self._kept = (device, engine._attention)
        engine._device = _TimedDevice(device, self)
        engine._attention = _Planning(engine._attention, self, device.forward)
        engine._finish = self.around("sample", device.forward, engine._finish)
        for staging in engine._staging:
            staging.copy_in = self.around("pack", device.copy_in, staging.copy_in)
        self._watched.parts = self

    def __exit__(self, *error: object) -> None:
        engine: Any = self._watched.engine
        engine._device, engine._attention = self._kept
        del engine._finish
        for staging in engine._staging:
            del staging.copy_in
        self._watched.parts = None

    def around(self, name: str, stream: Stream, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **settings: Any) -> Any:
            before, began = stream.record_event(), time.perf_counter()
            found = call(*args, **settings)
            took = time.perf_counter() - began
            self.of_step[name] = (before, stream.record_event(), took)
            return found

        return timed


class _TimedDevice:
    """A device with events around its copies."""

    def __init__(self, device: Device, parts: Parts) -> None:
        self.forward = device.forward
        self.copy_in: Stream = _TimedStream(device.copy_in, "copy in", parts)
        self.copy_out: Stream = _TimedStream(device.copy_out, "copy out", parts)
        self.host_buffer = device.host_buffer
        self.synchronize = device.synchronize


class _TimedStream:
    def __init__(self, stream: Stream, name: str, parts: Parts) -> None:
        self.run = parts.around(name, stream, stream.run)
        self.record_event = stream.record_event
        self.wait_event = stream.wait_event


class _Planning:
    """An attention backend with events around `prepare`."""

    def __init__(self, attention: Any, parts: Parts, stream: Stream) -> None:
        self._attention = attention
        self.prepare = parts.around("plan", stream, attention.prepare)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


# ---------------------------------------------------------------------------------------------------------- figures


def decode_figures(steps: Sequence[Step], weight_bytes: int, token_bytes: int) -> dict[str, Any]:
    """Over pairs of decode steps that follow each other: device time, idle time between them, and the roofline."""
    pairs = [(a, b) for a, b in pairwise(steps) if a.kind == b.kind == DECODE]
    most = max((step.load.rows for step in steps), default=0)
    full = [(a, b) for a, b in pairs if b.load.rows >= 0.9 * most]
    least = sum((weight_bytes + b.load.kv_tokens * token_bytes) / BYTES_PER_S for _, b in pairs)
    busy, idle = sum(b.computing_s for _, b in pairs), sum(b.idle_s(a) for a, b in pairs)
    return {
        "decode_pairs": len(pairs),
        "idle_share": idle / (busy + idle) if busy else None,
        "roofline_ratio": least / (busy + idle) if busy else None,
        "full_batch": _at_full_batch(full, most),
    }


def _at_full_batch(full: Sequence[tuple[Step, Step]], most: int) -> dict[str, Any]:
    """`most`: rows of the fullest step; a pair counts from nine tenths of it on. Milliseconds."""
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
    """Decode, mixed and prefill steps apart."""
    found = {}
    for kind in (DECODE, MIXED, PREFILL):
        of_kind = [step for step in steps if step.kind == kind]
        if of_kind:
            ms = [1e3 * step.computing_s for step in of_kind]
            launches = [1e3 * step.launch_s for step in of_kind]
            found[kind] = {
                "steps": len(of_kind),
                "tokens": sum(step.load.tokens for step in of_kind),
                "device_s": sum(ms) / 1e3,
                "step_ms_median": statistics.median(ms),
                **_upper("step_ms", ms),
                "launch_ms_median": statistics.median(launches),
            }
    return found


def parts_by_kind(steps: Sequence[Step]) -> dict[str, dict[str, dict[str, float]]]:
    """Kind -> device or host -> part -> mean milliseconds of a step. On the device `copy in` and `copy out` run beside
    the forward stream; the other parts add up to the step. On the host the parts add up to `launch`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in (DECODE, MIXED, PREFILL):
        of_kind = [step for step in steps if step.kind == kind and {"plan", "sample"} <= step.parts.keys()]
        if of_kind:
            device, host = zip(*(_parts_of(step) for step in of_kind), strict=True)
            found[kind] = {"device": _means(device, DEVICE_PARTS), "host": _means(host, HOST_PARTS)}
    return found


def _parts_of(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    spans, handle = step.parts, step.handle
    plan, sample = spans["plan"], spans["sample"]
    device = {name: to.seconds_since(start) for name, (start, to, _) in spans.items() if name.startswith("copy")}
    device |= {
        "apply": plan[0].seconds_since(handle.start),
        "plan": plan[1].seconds_since(plan[0]),
        "forward": sample[0].seconds_since(plan[1]),
        "sample": handle.computed.seconds_since(sample[0]),
    }
    host = {name: spans[name][2] for name in HOST_PARTS if name in spans}
    return device, host | {"other": step.launch_s - sum(host.values())}


def _means(rows: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    return {name: 1e3 * statistics.fmean(row.get(name, 0.0) for row in rows) for name in names}


def points(steps: Sequence[Step]) -> list[list[float]]:
    """[rows, tokens, samples, KV tokens, pairs, milliseconds] of each step, as `StepLoad` has them: what profiles of
    the simulated engine are made from."""
    return [[*step.load, round(1e3 * step.computing_s, 4)] for step in steps]
