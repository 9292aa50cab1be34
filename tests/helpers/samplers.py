"""Samplers of the torch and the CPU engine behind one interface, for suites that hold both to the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl._rust import CpuSampler
from minisgl.engine.api import SlotAssignment
from minisgl.engine.device import DeviceSampler, Layout, StepInputs, pack
from minisgl.engine.sampler import LogitsProcessors, LogprobSlots
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array, RingEntry, StepLimits, StepPlan

Logprobs = tuple[float, list[int], list[float]]  # of the token itself, the most likely ids, theirs
Floats = npt.NDArray[np.float32]
Masks = Sequence[Int32Array | None] | None  # by row: a bit for each token that may come
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Sampling parameters by row, [n] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor  # of the token to be sampled


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    tokens: list[int]
    changed: Floats  # the logits that they were sampled from
    logprobs: list[Logprobs | None]


class Sampler(Protocol):
    def assign(self, assignment: SlotAssignment) -> None: ...
    def step(self, logits: Floats, slots: Sequence[int], positions: Sequence[int], masks: Masks = None) -> Sampled: ...
    def record(self, slot: int, token: int) -> None: ...


def assign_all(sampler: DeviceSampler, assigned: Sequence[SlotAssignment], place: torch.device = CPU) -> None:
    """Assign slots through a packed step, the way an engine does."""
    rows = len(assigned)
    layout = Layout.of(StepPlan(num_assigned=rows), rows)
    block = np.zeros(layout.size, np.int32)
    limits = StepLimits(max_rows=rows, max_tokens=1, page_size=1, num_pages=1, max_seq_len=2)
    pack(block, layout, RingEntry(limits, rows), assigned)
    sampler.remember(assigned)
    sampler.assign(StepInputs(torch.from_numpy(block).to(place), layout).assigned)


class TorchSampler:
    def __init__(self, num_slots: int, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        self._sampler = DeviceSampler(num_slots, CPU)
        self._processors = LogitsProcessors(vocab_size, eos_ids, CPU)
        self._logprobs = LogprobSlots(num_slots)

    def assign(self, assignment: SlotAssignment) -> None:
        assign_all(self._sampler, [assignment])
        self._processors.assign(assignment)
        self._logprobs.assign(assignment)

    def step(self, logits: Floats, slots: Sequence[int], positions: Sequence[int], masks: Masks = None) -> Sampled:
        raw = torch.from_numpy(logits)
        changed = self._processors.apply(torch.from_numpy(masked(logits, masks)), slots, positions)
        needs = self._sampler.needs(np.array(slots, np.int32))
        tokens = self._sampler.sample(changed, torch.tensor(slots), torch.tensor(positions), needs)
        self._processors.record(tokens, slots)
        logprobs: list[Logprobs | None] = [None] * len(slots)
        fetch = self._logprobs.sampled(np.arange(len(slots)), np.array(slots, np.int64), raw, tokens)
        if fetch is not None:
            asked = fetch()
            for i, row in enumerate(asked.rows.tolist()):
                logprobs[row] = (asked.token_logprobs[i], list(asked.top_ids[i]), list(asked.top_logprobs[i]))
        return Sampled(tokens.tolist(), changed.numpy(), logprobs)

    def record(self, slot: int, token: int) -> None:
        self._processors.record(torch.tensor([token]), [slot])


class RustSampler:
    def __init__(self, num_slots: int, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        self._sampler = CpuSampler(num_slots, vocab_size, eos_ids)

    def assign(self, assignment: SlotAssignment) -> None:
        self._sampler.bind(assignment)

    def step(self, logits: Floats, slots: Sequence[int], positions: Sequence[int], masks: Masks = None) -> Sampled:
        changed = logits.copy()
        tokens, logprobs = self._sampler.step(changed, slots, positions, masks)
        return Sampled(tokens, changed, logprobs)

    def record(self, slot: int, token: int) -> None:
        self._sampler.record(slot, token)


SAMPLERS: dict[str, type[TorchSampler | RustSampler]] = {"torch": TorchSampler, "rust": RustSampler}


def masked(logits: Floats, masks: Masks) -> Floats:
    """Return the logits with disallowed tokens at -inf: bit i % 32 of word i // 32 allows token i."""
    logits = logits.copy()
    for row, mask in enumerate(masks or ()):
        if mask is not None:
            may = np.unpackbits(mask.view(np.uint8), bitorder="little", count=logits.shape[1])
            logits[row, may == 0] = -np.inf
    return logits


def assignment(
    slot: int, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int] = (), req_id: int = 0
) -> SlotAssignment:
    return SlotAssignment(slot, req_id, sampling, np.array([*prompt, *output], np.int32), len(prompt))


def draw(kind: str, logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the tokens [n] that the sampler `kind` draws from `logits` [n, vocab]."""
    count, vocab_size = logits.shape
    assigned = [
        assignment(
            row,
            SamplingParams(
                temperature=float(rows.temperature[row]),
                top_k=int(rows.top_k[row]),
                top_p=float(rows.top_p[row]),
                min_p=float(rows.min_p[row]),
                seed=int(rows.seed[row]),
            ),
            (),
        )
        for row in range(count)
    ]
    if kind == "torch":
        torch_sampler = DeviceSampler(count, CPU)
        assign_all(torch_sampler, assigned)
        needs = torch_sampler.needs(np.arange(count, dtype=np.int32))
        return torch_sampler.sample(logits, torch.arange(count), rows.position, needs)
    sampler = CpuSampler(count, vocab_size, ())
    for one in assigned:
        sampler.bind(one)
    tokens, _ = sampler.step(logits.float().contiguous().numpy().copy(), range(count), rows.position.tolist())
    return torch.tensor(tokens)
