"""64-bit digests of plans and outputs, to compare two schedulers.

Invariants: equal plans, or outputs, have equal digests on every machine; only live regions count. A digest is the
BLAKE2b hash of 8 bytes, read as a little-endian integer, over the header's fields in the order of their declaration as
int32 (those of states, page loads and low-priority tokens only if one of them is not 0), then the live regions in the
order of `RingEntry.__slots__`; request ids count as int64. All values are little-endian.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from minisgl.step import RingEntry, StepBuffers, StepOutput, StepPlan

_STATES = ("num_state_begins", "num_state_saves")
_SELDOM = ("num_page_loads", "num_background")
_FIELDS = tuple(field.name for field in fields(StepPlan) if field.name not in ("ring_index", *_STATES, *_SELDOM))


def plan_digest(plan: StepPlan, buffers: StepBuffers) -> int:
    """Return the digest of a plan: its header (without the ring index, which depends on the ring) and its arrays."""
    header = [getattr(plan, name) for name in _FIELDS]
    if plan.num_state_begins or plan.num_state_saves:
        header += [getattr(plan, name) for name in _STATES]
    header += [value for name in _SELDOM if (value := getattr(plan, name))]
    parts: list[npt.NDArray[np.int32] | npt.NDArray[np.int64]] = [np.array(header, np.int32)]
    return _digest(parts + live_regions(plan, buffers.ring[plan.ring_index]))


def output_digest(output: StepOutput) -> int:
    """Return the digest of a commit's output."""
    step = np.array([output.step], np.int32)
    return _digest([step, output.req_ids, output.tokens, output.reasons, output.rows])


def live_regions(plan: StepPlan, entry: RingEntry) -> list[npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    """Return the slices of `entry` that are valid under `plan`, in the order of `RingEntry.__slots__`."""
    rows = plan.padded_rows
    tokens = plan.num_tokens + rows - plan.num_rows
    lengths = {
        "input_ids": tokens,
        "positions": tokens,
        "out_loc": tokens,
        "req_slots": rows,
        "seq_lens": rows,
        "extend_lens": rows,
        "qo_indptr": rows + 1,
        "kv_indptr": rows + 1,
        "last_page_len": rows,
        "sample_rows": plan.num_samples,
        "page_table_updates": plan.num_page_table_updates,
        "page_ids": plan.num_page_ids,
        "assigned": plan.num_assigned,
        "assigned_ids": plan.num_assigned,
        "freed": plan.num_freed,
        "state_begins": plan.num_state_begins,
        "state_saves": plan.num_state_saves,
        "page_loads": plan.num_page_loads,
    }
    return [getattr(entry, name)[: lengths[name]] for name in RingEntry.__slots__]


def _digest(parts: list[npt.NDArray[np.int32] | npt.NDArray[np.int64]]) -> int:
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).tobytes())
    return int.from_bytes(state.digest(), "little")
