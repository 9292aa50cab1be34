"""What a step takes to the device, packed into one block, so that one copy a step carries it; and what comes back.

Keeps true: where a field lies depends on the plan's counts alone, and where those of a graph lie on the padded size
alone.
Doesn't know: the model, what fields mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.api import SlotBinding
from minisgl.engine.device_queue import Device, Mark
from minisgl.kernels.pages import UPDATE_FIELDS
from minisgl.step import Int32Array, RingEntry, StepLimits, StepPlan

BOUND_FIELDS = 7  # slot, top_k, seed (low, high), temperature, top_p, min_p (the bits of float32)
_ROW_FIELDS = ("req_slots", "seq_lens", "last_page_len")
_INDPTR_FIELDS = ("qo_indptr", "kv_indptr")
_TOKEN_FIELDS = ("input_ids", "positions", "out_loc")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fields of a step lie in its block, in int32 values."""

    rows: int  # padded
    tokens: int  # padding included
    samples: int = 0
    page_table_updates: int = 0
    page_ids: int = 0
    bound: int = 0

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
        sizes["bound"] = self.bound * BOUND_FIELDS
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = (at, at + size)
            at += size
        return found

    @property
    def size(self) -> int:
        return self.fields()["bound"][1]


class StepInputs:
    """The fields of a step as views of a block on the device."""

    def __init__(self, block: Tensor, layout: Layout) -> None:
        view = {name: block[start:end] for name, (start, end) in layout.fields().items()}
        self.layout = layout
        self.input_ids, self.positions, self.out_loc = (view[name] for name in _TOKEN_FIELDS)
        self.req_slots, self.seq_lens, self.last_page_len = (view[name] for name in _ROW_FIELDS)
        self.qo_indptr, self.kv_indptr = (view[name] for name in _INDPTR_FIELDS)
        self.sample_rows = view["sample_rows"]
        self.page_table_updates = view["page_table_updates"].view(layout.page_table_updates, UPDATE_FIELDS)
        self.page_ids = view["page_ids"]
        self.bound = view["bound"].view(layout.bound, BOUND_FIELDS)


def pack(block: Int32Array, layout: Layout, entry: RingEntry, bindings: Sequence[SlotBinding]) -> None:
    """Write the live regions of `entry` into `block`."""
    at = layout.fields()
    for name in (*_TOKEN_FIELDS, *_ROW_FIELDS, *_INDPTR_FIELDS, "sample_rows", "page_ids"):
        start, end = at[name]
        block[start:end] = getattr(entry, name)[: end - start]
    start, end = at["page_table_updates"]
    updates = block[start:end].reshape(-1, UPDATE_FIELDS)
    updates[:, :3] = entry.page_table_updates[: layout.page_table_updates]
    updates[:, 3] = np.cumsum(updates[:, 2]) - updates[:, 2]
    start, end = at["bound"]
    if bindings:
        block[start:end] = np.concatenate([_bound(binding) for binding in bindings])


def _bound(binding: SlotBinding) -> Int32Array:
    sampling = binding.sampling
    assert sampling.seed is not None
    seed = np.array([sampling.seed], np.int64).view(np.int32)  # low half first
    temperature, top_p = (0.0, 1.0) if sampling.is_greedy else (sampling.temperature, sampling.top_p)
    floats = np.array([temperature, top_p, sampling.min_p], np.float32).view(np.int32)
    head = np.array([binding.slot, min(sampling.top_k, _INT32_MAX)], np.int32)
    return np.concatenate([head, seed, floats])


class Stage:
    """One of the blocks that steps take in turns: on the host, on the device, and what comes back from it.

    Its fence is the end of the step that had it last, which comes after each copy and each read: whoever sends another
    step has waited for that."""

    def __init__(self, device: Device, place: torch.device, num_values: int, max_rows: int) -> None:
        self.host = device.host_block(num_values)
        self.host_array: Int32Array = self.host.numpy()
        self.there = torch.zeros(num_values, dtype=torch.int32, device=place)
        self.out_there = torch.zeros(max_rows + 1, dtype=torch.int32, device=place)  # tokens by row; all is finite
        self.out_host = device.host_block(max_rows + 1)

    def send(self, device: Device, layout: Layout, entry: RingEntry, bindings: Sequence[SlotBinding]) -> None:
        """Pack and queue the copy; the forward queue goes after it."""
        pack(self.host_array, layout, entry, bindings)
        size, there, host = layout.size, self.there, self.host
        device.copy_in.run("copy in", lambda: _copy(there[:size], host[:size]))
        device.forward.after(device.copy_in.mark())

    def bring_back(self, device: Device, computed: Mark, num_values: int) -> Mark:
        """Queue the copy of the results behind the forward; the mark returned says that they are there."""
        device.copy_out.after(computed)
        there, host = self.out_there, self.out_host
        device.copy_out.run("copy out", lambda: _copy(host[:num_values], there[:num_values]))
        return device.copy_out.mark()


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)
