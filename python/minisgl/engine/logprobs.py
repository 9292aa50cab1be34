"""Log probabilities of sampled and of prompt tokens, from the model's own distribution.

Rows pay only for what they ask. Prompt tokens go through the head in chunks, so that a long prompt does not hold
[tokens, vocab] logits at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.engine.api import PromptLogprobs, SlotAssignment, StepLogprobs
from minisgl.step import RingEntry, StepPlan

_CHUNK = 128  # prompt positions that go through the head at once


class LogprobSlots:
    """What each request slot asks for: -1 nothing, else the number of alternatives."""

    def __init__(self, num_slots: int) -> None:
        self._sampled = np.full(num_slots, -1, np.int32)
        self._prompts: dict[int, SlotAssignment] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        sampling = assignment.sampling
        self._sampled[assignment.slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._prompts.pop(assignment.slot, None)
        if sampling.prompt_logprobs is not None:
            self._prompts[assignment.slot] = assignment

    def of_sampled(
        self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], logits: Tensor, chosen: Tensor
    ) -> StepLogprobs | None:
        """Of the tokens `chosen` [m] in `rows` [m] with `logits` [m, vocab]; None if no row asked."""
        fetch = self.deferred_sampled(rows, slots, logits, chosen)
        return None if fetch is None else fetch()

    def deferred_sampled(
        self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], logits: Tensor, chosen: Tensor
    ) -> Callable[[], StepLogprobs] | None:
        """The same, computed on the device; the call copies it to the host, once the device is done."""
        wanted = self._sampled[slots]
        asked = np.flatnonzero(wanted >= 0)
        if not len(asked):
            return None
        at = torch.from_numpy(asked).to(logits.device, non_blocking=True)
        counts = wanted[asked].tolist()
        found = _top(logits[at], chosen[at], max(counts))

        def fetch() -> StepLogprobs:
            own, top_ids, top = _lists(found)
            return StepLogprobs(
                rows=rows[asked].astype(np.int32),
                token_logprobs=own,
                top_ids=[ids[:count] for ids, count in zip(top_ids, counts, strict=True)],
                top_logprobs=[values[:count] for values, count in zip(top, counts, strict=True)],
            )

        return fetch

    def of_prompts(
        self, plan: StepPlan, entry: RingEntry, hidden: Tensor, head: Callable[[Tensor], Tensor]
    ) -> list[PromptLogprobs]:
        """Of the prompt tokens that follow those computed in this step. `hidden` [num_tokens, size]."""
        return [fetch() for fetch in self.deferred_prompts(plan, entry, hidden, head)]

    def deferred_prompts(
        self, plan: StepPlan, entry: RingEntry, hidden: Tensor, head: Callable[[Tensor], Tensor]
    ) -> list[Callable[[], PromptLogprobs]]:
        """The same, computed on the device; the calls copy it to the host."""
        found = []
        for row in range(plan.num_rows) if self._prompts else ():
            assignment = self._prompts.get(int(entry.req_slots[row]))
            if assignment is None:
                continue
            start, end = int(entry.qo_indptr[row]), int(entry.qo_indptr[row + 1])
            first = int(entry.positions[start]) + 1
            count = min(end - start, assignment.num_prompt - first)
            if count > 0:
                found.append(_of_prompt(assignment, first, hidden[start : start + count], head))
        return found


def _of_prompt(
    assignment: SlotAssignment, first: int, hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> Callable[[], PromptLogprobs]:
    top_count = assignment.sampling.prompt_logprobs or 0
    chunks = []
    for at in range(0, len(hidden), _CHUNK):
        chunk = hidden[at : at + _CHUNK]
        tokens = assignment.tokens[first + at : first + at + len(chunk)].astype(np.int64)
        logits = head(chunk)
        chunks.append(_top(logits, torch.from_numpy(tokens).to(logits.device, non_blocking=True), top_count))

    def fetch() -> PromptLogprobs:
        own: list[float] = []
        top_ids: list[list[int]] = []
        top: list[list[float]] = []
        for chunk in chunks:
            found = _lists(chunk)
            own += found[0]
            top_ids += found[1]
            top += found[2]
        return PromptLogprobs(assignment.req_id, first, own, top_ids, top)

    return fetch


def _top(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of `tokens` [n], and the `count` most likely ids with theirs, most likely first."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return own, top.indices, top.values


def _lists(found: tuple[Tensor, Tensor, Tensor]) -> tuple[list[float], list[list[int]], list[list[float]]]:
    own, ids, values = found
    return own.tolist(), ids.tolist(), values.tolist()
