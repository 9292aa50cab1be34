"""The inputs of a step, packed into one buffer, so that one copy a step takes them to the device; and its outputs.

Invariants: where a field lies depends on the plan's counts alone; fields that a graph reads, on the padded size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.api import SlotAssignment
from minisgl.engine.device_streams import Device, DeviceEvent
from minisgl.kernels.pages import UPDATE_FIELDS
from minisgl.step import Int32Array, RingEntry, StepLimits, StepPlan

ASSIGNED_FIELDS = 7  # slot, top_k, seed (low, high), temperature, top_p, min_p (the bits of float32)
_ROW_FIELDS = ("req_slots", "seq_lens", "last_page_len")
_INDPTR_FIELDS = ("qo_indptr", "kv_indptr")
_TOKEN_FIELDS = ("input_ids", "positions", "out_loc")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fields of a step lie in its buffer, in int32 values."""

    rows: int  # padded
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
        """Name -> (start, end), one after the other; those that a graph reads come first."""
        sizes = dict.fromkeys(_TOKEN_FIELDS, self.tokens)
        sizes |= dict.fromkeys(_ROW_FIELDS, self.rows)
        sizes |= dict.fromkeys(_INDPTR_FIELDS, self.rows + 1)
        sizes["sample_rows"] = self.samples
        sizes["page_table_updates"] = self.page_table_updates * UPDATE_FIELDS
        sizes["page_ids"] = self.page_ids
        sizes["assigned"] = self.assigned * ASSIGNED_FIELDS
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = (at, at + size)
            at += size
        return found

    @property
    def size(self) -> int:
        return self.fields()["assigned"][1]


class StepInputs:
    """The fields of a step as views of a buffer on the device."""

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
    """Write the live regions of `entry` into `buffer`."""
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
    """Inputs and outputs of a step, on the host and on the device. Steps take turns with a few of them.

    It is free again when its last step has ended, which comes after each copy and each read: the engine waits for that
    before it copies another step in."""

    def __init__(self, device: Device, torch_device: torch.device, num_values: int, max_rows: int) -> None:
        self.inputs_host = device.host_buffer(num_values)
        self._inputs_array: Int32Array = self.inputs_host.numpy()
        self.inputs_device = torch.zeros(num_values, dtype=torch.int32, device=torch_device)
        self.outputs_host = device.host_buffer(max_rows + 1)  # tokens by row; whether all is finite
        self.outputs_device = torch.zeros(max_rows + 1, dtype=torch.int32, device=torch_device)

    def copy_in(self, device: Device, layout: Layout, entry: RingEntry, assignments: Sequence[SlotAssignment]) -> None:
        """Pack the inputs and queue the copy; the forward stream waits for it."""
        pack(self._inputs_array, layout, entry, assignments)
        to, source = self.inputs_device[: layout.size], self.inputs_host[: layout.size]
        device.copy_in.run("copy in", lambda: copy(to, source))
        device.forward.wait_event(device.copy_in.record_event())

    def copy_out(self, device: Device, computed: DeviceEvent, num_values: int) -> DeviceEvent:
        """Queue the copy of the outputs behind the forward; the event returned is its end."""
        device.copy_out.wait_event(computed)
        to, source = self.outputs_host[:num_values], self.outputs_device[:num_values]
        device.copy_out.run("copy out", lambda: copy(to, source))
        return device.copy_out.record_event()


def copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)
