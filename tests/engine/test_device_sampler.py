"""Sampling on a device gives the host's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.engine.api import SlotAssignment
from minisgl.engine.device import DeviceSampler, Layout, StepInputs, pack
from minisgl.engine.sampler import SamplingRows, sample
from minisgl.sampling_params import SamplingParams
from minisgl.step import RingEntry, StepLimits, StepPlan

CPU = torch.device("cpu")


def assignment(slot: int, **sampling: Any) -> SlotAssignment:
    return SlotAssignment(slot, slot, SamplingParams(**sampling), np.zeros(1, np.int32), 1)


def assign_all(sampler: DeviceSampler, params: Sequence[SamplingParams], place: torch.device) -> None:
    """Slot i gets `params[i]`, by a packed step."""
    rows = len(params)
    assigned = [SlotAssignment(i, i, one, np.zeros(1, np.int32), 1) for i, one in enumerate(params)]
    layout = Layout.of(StepPlan(num_assigned=rows), rows)
    block = np.zeros(layout.size, np.int32)
    limits = StepLimits(max_rows=rows, max_tokens=1, page_size=1, num_pages=1, max_seq_len=2)
    pack(block, layout, RingEntry(limits, rows), assigned)
    sampler.remember(assigned)
    sampler.assign(StepInputs(torch.from_numpy(block).to(place), layout).assigned)


@pytest.mark.parametrize("seed", range(8))
def test_device_sampling_gives_the_hosts_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab = 24, 300
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32) * 3)
    assigned = [
        assignment(
            slot,
            temperature=float(rng.choice([0.0, 0.5, 1.7])),
            top_k=int(rng.choice([-1, 1, 7, 1000])),
            top_p=float(rng.choice([1.0, 0.6])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(-(2**63), 2**63)),
        )
        for slot in range(rows)
    ]
    slots = rng.permutation(rows).astype(np.int32)
    position = torch.from_numpy(rng.integers(0, 1000, rows))
    sampler = DeviceSampler(rows + 1, CPU)
    assign_all(sampler, [one.sampling for one in assigned], CPU)
    slots_device = torch.from_numpy(slots).long()
    got = sampler.sample(logits, slots_device, position, sampler.needs(slots))
    params = [assigned[slot].sampling for slot in slots.tolist()]
    host = SamplingRows(
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.tensor([p.seed for p in params]),
        position,
    )
    assert got.tolist() == sample(logits, host).tolist()
    one = sampler.sample(logits[3:4], slots_device[3:4], position[3:4], sampler.needs(slots[3:4]))
    assert one.tolist() == got[3:4].tolist()


def test_rows_of_nan_give_an_id_of_the_vocabulary() -> None:
    sampler = DeviceSampler(2, CPU)
    assigned = [assignment(0, temperature=1.0, seed=1)]
    sampler.remember(assigned)
    sampler._floats[0] = torch.tensor([1.0, 1.0, 0.0])
    slots = np.zeros(1, np.int32)
    chosen = sampler.sample(
        torch.full((1, 9), float("nan")), torch.zeros(1).long(), torch.ones(1).long(), sampler.needs(slots)
    )
    assert 0 <= int(chosen) < 9
