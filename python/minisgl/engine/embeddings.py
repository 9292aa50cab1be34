"""Embeddings of prompts: hidden states behind the final norm, pooled over the steps that compute them.

Invariants: sums are float32, whatever the model computes in; a slot that is assigned again begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.engine.api import Embedding, SlotAssignment
from minisgl.step import RingEntry, StepPlan


@dataclass(slots=True, eq=False)
class _Pool:
    assignment: SlotAssignment
    total: Tensor | None = None


class EmbeddingSlots:
    """By request slot."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        self._pools.pop(assignment.slot, None)
        if assignment.sampling.embedding is not None:
            self._pools[assignment.slot] = _Pool(assignment)

    def of_prompts(self, plan: StepPlan, entry: RingEntry, hidden: Tensor) -> list[Embedding]:
        """Of the prompts whose last token is in this step. `hidden` [num_tokens, size]."""
        found = []
        for row in range(plan.num_rows) if self._pools else ():
            pool = self._pools.get(int(entry.req_slots[row]))
            if pool is None:
                continue
            start, end = int(entry.qo_indptr[row]), int(entry.qo_indptr[row + 1])
            left = pool.assignment.num_prompt - int(entry.positions[start])  # of the prompt
            if left <= 0:
                continue
            is_mean, ends = pool.assignment.sampling.embedding == "mean", left <= end - start
            if is_mean:
                chunk = hidden[start : min(end, start + left)].sum(0, dtype=torch.float32)
                pool.total = chunk if pool.total is None else pool.total + chunk
            elif ends:
                pool.total = hidden[start + left - 1].float()
            if ends and pool.total is not None:
                numbers = pool.total / (pool.assignment.num_prompt if is_mean else 1)
                found.append(Embedding(pool.assignment.req_id, numbers.cpu().numpy()))
        return found
