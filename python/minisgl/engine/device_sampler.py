"""Sampling on a device: the same tokens as `sampler`, from parameters that lie on the device by slot.

Invariants: no operation waits for the device or has a size that the host doesn't know; a row's token depends on its
logits, its parameters, its seed and its position only; random numbers are the project's own, so equal seeds give equal
tokens on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.engine import sampler
from minisgl.engine.api import SlotAssignment
from minisgl.step import Int32Array

Renormalise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(probabilities [n, vocab] float32, top_k [n] int64 with 0 or less for off, top_p [n]) -> the rest are zeros."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the rows of a step ask for. The host knows it, so that only that is computed."""

    sampled: bool  # not all are greedy
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
        """The host's part of `assign`."""
        for assignment in assignments:
            slot, sampling = assignment.slot, assignment.sampling
            self._sampled[slot] = not sampling.is_greedy
            self._min_p_asked[slot] = sampling.min_p > 0
            self._truncated[slot] = sampling.top_k > 0 or sampling.top_p < 1

    def assign(self, assigned: Tensor) -> None:
        """`assigned` [n, ASSIGNED_FIELDS] int32 of `device_buffers`, on the device."""
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
        """logits [n, vocab] of the tokens at `position` [n] int64 of the requests in `slots` [n] int64 -> [n] int64."""
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
        # a row of NaN gives an id past the vocabulary: the step fails anyway, but must not read out of bounds before
        return torch.where(sampled, chosen, greedy).clamp_(max=logits.shape[-1] - 1)
