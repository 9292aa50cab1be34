"""Device objects of the torch engine: streams and events that order its work, the inputs of a step packed into one
buffer (one copy a step), grammar masks, and the sampler.

The streams' calls are those of `torch.cuda`. The engine orders all its work through these few calls, so that a test can
substitute a device that runs each job as late or as early as the calls allow.

Invariants: `run`, `record_event` and `wait_event` return at once; a job sees everything before it in its stream, and
everything before the events that its stream waits for. The offset of a field in the buffer depends on the plan's counts
alone; for fields that a graph reads, on the padded size alone. No mask buffer is allocated before the first grammar, or
rewritten before the step that uses it has ended. No operation of the sampler waits for the device or has a size that
the host does not know; a token depends on its row's logits, parameters, seed and position only, with minisgl's own
random number generator, so equal seeds give equal tokens on every device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.engine import sampler
from minisgl.engine.api import SlotAssignment
from minisgl.engine.sampler import Mask
from minisgl.grammar.slots import TokenMasks
from minisgl.kernels.ops import UPDATE_FIELDS, mask_tokens
from minisgl.step import Int32Array, RingEntry, StepLimits, StepPlan


class DeviceEvent(Protocol):
    """A point in a stream's queue of work, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the stream has passed the event, without blocking."""

    def synchronize(self) -> None:
        """Block the caller until the stream has passed the event. Raises the device's error if it failed."""

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the device time in seconds from `earlier` to this event. Both must have passed."""


class Stream(Protocol):
    def run(self, name: str, job: Callable[[], None]) -> None:
        """Queue `job` and return at once. Host memory that it reads must not change until a later event has passed."""

    def record_event(self) -> DeviceEvent: ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Make the jobs that are queued from now on run after `event`."""


class Device(Protocol):
    survives_errors: bool
    """Whether the device is usable after a job has raised."""
    forward: Stream
    copy_in: Stream
    copy_out: Stream

    def host_buffer(self, size: int) -> Tensor:
        """Allocate [size] int32 zeros on the host, pinned if there is a GPU, so that copies need not block."""

    def synchronize(self) -> None:
        """Block until the device has finished all its work, including work outside of these streams."""


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream, nvtx: bool) -> None:
        self.stream = stream
        self._nvtx = nvtx

    def run(self, name: str, job: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream), torch.cuda.nvtx.range(name) if self._nvtx else nullcontext():
            job()

    def record_event(self) -> _CudaEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return _CudaEvent(event)

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice:
    """A CUDA device with streams for copies in, forwards and copies out. `nvtx`: queued jobs are named NVTX ranges."""

    survives_errors = False

    def __init__(self, device: torch.device, *, nvtx: bool = False) -> None:
        self.forward_stream = torch.cuda.Stream(device)
        self.forward: Stream = _CudaStream(self.forward_stream, nvtx)
        self.copy_in: Stream = _CudaStream(torch.cuda.Stream(device), nvtx)
        self.copy_out: Stream = _CudaStream(torch.cuda.Stream(device), nvtx)

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.forward_stream.device)


class _InlineEvent:
    def __init__(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, _InlineEvent)
        return self._time - earlier._time


class _InlineStream:
    def run(self, name: str, job: Callable[[], None]) -> None:
        job()

    def record_event(self) -> _InlineEvent:
        return _InlineEvent()

    def wait_event(self, event: DeviceEvent) -> None:
        return


class InlineDevice:
    """A device that runs each job on the CPU at the moment when it is queued."""

    survives_errors = True

    def __init__(self) -> None:
        self.forward: Stream = _InlineStream()
        self.copy_in: Stream = self.forward
        self.copy_out: Stream = self.forward

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def synchronize(self) -> None:
        return


ASSIGNED_FIELDS = 7  # slot, top_k, seed (low, high), temperature, top_p, min_p (float32 bits)
_ROW_FIELDS = ("req_slots", "seq_lens", "last_page_len")
_INDPTR_FIELDS = ("qo_indptr", "kv_indptr")
_TOKEN_FIELDS = ("input_ids", "positions", "out_loc")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of a step's fields in its input buffer, in int32 values."""

    rows: int  # padding included
    tokens: int  # padding included
    samples: int = 0
    page_table_updates: int = 0
    page_ids: int = 0
    assigned: int = 0

    @staticmethod
    def of(plan: StepPlan, num_assigned: int) -> Layout:
        tokens = plan.num_tokens + plan.padded_rows - plan.num_rows
        return Layout(
            plan.padded_rows, tokens, plan.num_samples, plan.num_page_table_updates, plan.num_page_ids, num_assigned
        )

    @staticmethod
    def largest(limits: StepLimits, max_padded_rows: int) -> Layout:
        rows = max(limits.max_rows, max_padded_rows)
        return Layout(rows, limits.max_tokens + rows, rows, rows, limits.max_page_changes, limits.max_rows)

    def fields(self) -> dict[str, tuple[int, int]]:
        """Return (start, end) by field name, contiguous; the fields that a graph reads come first."""
        sizes = dict.fromkeys(_TOKEN_FIELDS, self.tokens)
        sizes |= dict.fromkeys(_ROW_FIELDS, self.rows)
        sizes |= dict.fromkeys(_INDPTR_FIELDS, self.rows + 1)
        sizes["sample_rows"] = self.samples
        sizes["page_table_updates"] = self.page_table_updates * UPDATE_FIELDS
        sizes["page_ids"] = self.page_ids
        sizes["assigned"] = self.assigned * ASSIGNED_FIELDS
        fields, at = {}, 0
        for name, size in sizes.items():
            fields[name] = (at, at + size)
            at += size
        return fields

    @property
    def size(self) -> int:
        return self.fields()["assigned"][1]


class StepInputs:
    """The input fields of a step as views of a buffer on the device."""

    def __init__(self, buffer: Tensor, layout: Layout) -> None:
        view = {name: buffer[start:end] for name, (start, end) in layout.fields().items()}
        self.layout = layout
        self.input_ids, self.positions, self.out_loc = (view[name] for name in _TOKEN_FIELDS)
        self.req_slots, self.seq_lens, self.last_page_len = (view[name] for name in _ROW_FIELDS)
        self.qo_indptr, self.kv_indptr = (view[name] for name in _INDPTR_FIELDS)
        self.sample_rows = view["sample_rows"]
        self.page_table_updates = view["page_table_updates"].view(layout.page_table_updates, UPDATE_FIELDS)
        self.page_ids = view["page_ids"]
        self.assigned = view["assigned"].view(layout.assigned, ASSIGNED_FIELDS)


def pack(buffer: Int32Array, layout: Layout, entry: RingEntry, assignments: Sequence[SlotAssignment]) -> None:
    """Write the used parts of a ring entry and the assignments into `buffer` at the offsets of `layout`."""
    at = layout.fields()
    for name in (*_TOKEN_FIELDS, *_ROW_FIELDS, *_INDPTR_FIELDS, "sample_rows", "page_ids"):
        start, end = at[name]
        buffer[start:end] = getattr(entry, name)[: end - start]
    start, end = at["page_table_updates"]
    updates = buffer[start:end].reshape(-1, UPDATE_FIELDS)
    updates[:, :3] = entry.page_table_updates[: layout.page_table_updates]
    updates[:, 3] = np.cumsum(updates[:, 2]) - updates[:, 2]
    start, end = at["assigned"]
    if assignments:
        buffer[start:end] = np.concatenate([_assigned(assignment) for assignment in assignments])


def _assigned(assignment: SlotAssignment) -> Int32Array:
    sampling = assignment.sampling
    assert sampling.seed is not None
    seed = np.array([sampling.seed], np.int64).view(np.int32)  # low half first
    temperature, top_p = (0.0, 1.0) if sampling.is_greedy else (sampling.temperature, sampling.top_p)
    floats = np.array([temperature, top_p, sampling.min_p], np.float32).view(np.int32)
    head = np.array([assignment.slot, min(sampling.top_k, _INT32_MAX)], np.int32)
    return np.concatenate([head, seed, floats])


class StagingBuffer:
    """Host and device buffers for the inputs and outputs of one step; steps alternate between `NUM_BUFFERS` of them.

    A buffer is free when its last step has ended, with all copies and reads; the engine waits for that before reuse.
    """

    def __init__(self, device: Device, torch_device: torch.device, num_values: int, max_rows: int) -> None:
        self.inputs_host = device.host_buffer(num_values)
        self._inputs_array: Int32Array = self.inputs_host.numpy()
        self.inputs_device = torch.zeros(num_values, dtype=torch.int32, device=torch_device)
        # tokens of the sampled rows, then whether each row is finite
        self.outputs_host = device.host_buffer(2 * max_rows)
        self.outputs_device = torch.zeros(2 * max_rows, dtype=torch.int32, device=torch_device)

    def copy_in(self, device: Device, layout: Layout, entry: RingEntry, assignments: Sequence[SlotAssignment]) -> None:
        """Pack the inputs and queue their copy to the device; the forward stream waits for it."""
        pack(self._inputs_array, layout, entry, assignments)
        to, source = self.inputs_device[: layout.size], self.inputs_host[: layout.size]
        device.copy_in.run("copy in", lambda: copy(to, source))
        device.forward.wait_event(device.copy_in.record_event())

    def copy_out(self, device: Device, computed: DeviceEvent, num_values: int) -> DeviceEvent:
        """Queue the copy of `num_values` outputs to the host after `computed`; return the event of its end."""
        device.copy_out.wait_event(computed)
        to, source = self.outputs_host[:num_values], self.outputs_device[:num_values]
        device.copy_out.run("copy out", lambda: copy(to, source))
        return device.copy_out.record_event()


def copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


class DeviceMasks:
    """Device buffers for grammar masks of up to `max_rows` rows; steps alternate between `num_buffers` of them."""

    def __init__(self, device: Device, place: torch.device, vocab_size: int, max_rows: int, num_buffers: int) -> None:
        self._device = device
        self._place = place
        self._num_words = -(-vocab_size // 32)
        self._size = max_rows * (1 + self._num_words)  # for each row, its index and its bits
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_buffers

    def copy_in(self, turn: int, masks: TokenMasks) -> Mask:
        """Queue the copy of `masks` to buffer `turn`. Returns a function for the forward stream that applies them."""
        buffers = self._buffers[turn]
        if buffers is None:
            # not zeroed: that would run in torch's own stream, which no copy waits for, and overwrite the first masks
            on_device = torch.empty(self._size, dtype=torch.int32, device=self._place)
            buffers = self._buffers[turn] = (self._device.host_buffer(self._size), on_device)
        host, on_device = buffers
        count, size = len(masks.rows), len(masks.rows) * (1 + self._num_words)
        array = host.numpy()
        array[:count] = masks.rows
        array[count:size] = masks.bits.reshape(-1)
        self._device.copy_in.run("copy masks", lambda: copy(on_device[:size], host[:size]))
        self._device.forward.wait_event(self._device.copy_in.record_event())
        rows, bits = on_device[:count], on_device[count:size].view(count, self._num_words)
        return lambda logits: mask_tokens(logits, rows, bits)


Renormalise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Truncation: (probabilities [n, vocab] float32, top_k [n] int64 (<= 0: off), top_p [n]) -> zeros for the others."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Sampling features that the rows of a step use. The host knows them, so that only those are computed."""

    sampled: bool  # at least one row is not greedy
    min_p: bool
    truncated: bool  # by top-k or top-p


class DeviceSampler:
    def __init__(self, num_slots: int, device: torch.device, renormalise: Renormalise | None = None) -> None:
        self._sampled = np.zeros(num_slots, np.bool_)
        self._min_p_asked = np.zeros(num_slots, np.bool_)
        self._truncated = np.zeros(num_slots, np.bool_)
        self._floats = torch.zeros(num_slots, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self._ints = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)  # top_k, seed
        self._renormalise = renormalise or sampler.truncate

    def remember(self, assignments: Sequence[SlotAssignment]) -> None:
        """Record on the host which sampling features the assigned slots use; `assign` stores the parameters."""
        for assignment in assignments:
            slot, sampling = assignment.slot, assignment.sampling
            self._sampled[slot] = not sampling.is_greedy
            self._min_p_asked[slot] = sampling.min_p > 0
            self._truncated[slot] = sampling.top_k > 0 or sampling.top_p < 1

    def assign(self, assigned: Tensor) -> None:
        """Store the sampling parameters of assigned slots; `assigned` [n, ASSIGNED_FIELDS] int32 is on the device."""
        if not len(assigned):
            return
        slots = assigned[:, 0].long()
        seed = (assigned[:, 3].long() << 32) | (assigned[:, 2].long() & 0xFFFFFFFF)
        self._ints[slots] = torch.stack((assigned[:, 1].long(), seed), 1)
        self._floats[slots] = assigned[:, 4:7].contiguous().view(torch.float32)

    def needs(self, slots: Int32Array) -> Needs:
        sampled = self._sampled[slots]
        return Needs(
            bool(sampled.any()),
            bool((sampled & self._min_p_asked[slots]).any()),
            bool((sampled & self._truncated[slots]).any()),
        )

    def sample(self, logits: Tensor, slots: Tensor, position: Tensor, needs: Needs) -> Tensor:
        """Sample ids [n] int64 from logits [n, vocab] of request `slots` [n] int64 at `position` [n] int64."""
        greedy = logits.max(-1).indices
        if not needs.sampled:
            return greedy
        temperature, top_p, min_p = self._floats[slots].unbind(1)
        top_k, seed = self._ints[slots].unbind(1)
        sampled = temperature > 0
        scaled = logits.float() / torch.where(sampled, temperature, 1.0)[:, None]
        probabilities = scaled.softmax(-1)
        if needs.min_p:
            floor = probabilities.amax(-1, keepdim=True) * min_p[:, None]
            probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        if needs.truncated:
            probabilities = self._renormalise(probabilities, top_k, top_p)
        chosen = sampler.inverse_cdf(probabilities, sampler.uniforms(seed, position))
        # a row of NaN gives an id beyond the vocabulary: the step fails anyway, but must not read out of bounds first
        return torch.where(sampled, chosen, greedy).clamp_(max=logits.shape[-1] - 1)
