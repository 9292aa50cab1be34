"""Packed steps: what is packed is what a step reads, wherever a graph expects it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.engine.api import SlotAssignment
from minisgl.engine.device import Layout, StepInputs, pack
from minisgl.sampling_params import SamplingParams
from minisgl.step import RingEntry, StepLimits, StepPlan

EXAMPLES = settings(max_examples=60, deadline=None)


def assignment(slot: int, **sampling: Any) -> SlotAssignment:
    return SlotAssignment(slot, slot, SamplingParams(**sampling), np.zeros(1, np.int32), 1)


@EXAMPLES
@given(st.integers(0, 2**32))
def test_packed_inputs_equal_the_ring_entry(seed: int) -> None:
    rng = np.random.default_rng(seed)
    limits = StepLimits(max_rows=5, max_tokens=17, page_size=4, num_pages=30, max_seq_len=64)
    entry = RingEntry(limits, 8)
    for name in RingEntry.__slots__:
        array = getattr(entry, name)
        array[...] = rng.integers(0, 50, array.shape)
    rows = int(rng.integers(0, 6))
    plan = StepPlan(
        num_rows=rows,
        padded_rows=rows + int(rng.integers(0, 3)),
        num_tokens=rows + int(rng.integers(0, 8)),
        num_samples=int(rng.integers(0, rows + 1)),
        num_page_table_updates=int(rng.integers(0, rows + 1)),
        num_page_ids=int(rng.integers(0, 9)),
    )
    assigned = [assignment(i, seed=int(rng.integers(-(2**63), 2**63)), top_k=2**40 if i else -1) for i in range(rows)]
    layout = Layout.of(plan, len(assigned))
    largest = Layout.largest(limits, 8)
    assert layout.size <= largest.size
    block = np.full(largest.size, -7, np.int32)
    pack(block, layout, entry, assigned)
    assert (block[layout.size :] == -7).all()
    inputs = StepInputs(torch.from_numpy(block), layout)
    tokens = plan.num_tokens + plan.padded_rows - plan.num_rows
    sizes = {"input_ids": tokens, "positions": tokens, "out_loc": tokens}
    sizes |= dict.fromkeys(("req_slots", "seq_lens", "last_page_len"), plan.padded_rows)
    sizes |= dict.fromkeys(("qo_indptr", "kv_indptr"), plan.padded_rows + 1)
    sizes |= {"sample_rows": plan.num_samples, "page_ids": plan.num_page_ids}
    for name, size in sizes.items():
        assert getattr(inputs, name).tolist() == getattr(entry, name)[:size].tolist(), name
    starts = 0
    for mine, theirs in zip(inputs.page_table_updates.tolist(), entry.page_table_updates.tolist(), strict=False):
        assert mine == [*theirs, starts]
        starts += theirs[2]


def test_offsets_of_graph_fields_depend_on_the_padded_size_only() -> None:
    """Whatever else a step carries."""
    plain, full = Layout(8, 8).fields(), Layout(8, 8, 5, 3, 9, 4).fields()
    for name in ("input_ids", "positions", "out_loc", "req_slots", "seq_lens", "kv_indptr"):
        assert plain[name] == full[name]
