"""Logits processors: penalties, bias, allowed tokens, bad words, no end before min_tokens. Temperature and what follows
it is in sampler.py.

Invariants: rows without a processor keep their logits bit for bit; token counts follow the tokens in forward order, so
they are right whatever the host knows yet; a slot that is assigned again starts from the sequence it is assigned with;
some token can always be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl.engine.api import SlotAssignment
from minisgl.sampling_params import SamplingParams

Mask = Callable[[Tensor], None]
"""Takes from logits [n, vocab] float32, in place, the ids that may not come by their rows' grammars."""
_ANY = -1  # before a sequence that is shorter than the longest: whatever was generated
_NONE = -2  # before the output's first token: no id


class _BadSequences:
    """Sequences of ids that the output must not have: the last id of one is banned where the output ends with those
    before it."""

    def __init__(self, sequences: Sequence[Sequence[int]], output: Sequence[int], device: torch.device) -> None:
        longest = max(map(len, sequences)) - 1
        starts = [[_ANY] * (longest + 1 - len(ids)) + list(ids[:-1]) for ids in sequences]
        self._starts = _ids(starts, device).reshape(len(sequences), longest)
        self._last = _ids([ids[-1] for ids in sequences], device)
        recent = list(output[max(0, len(output) - longest) :])
        self._recent = _ids([_NONE] * (longest - len(recent)) + recent, device)

    def ban(self, logits: Tensor) -> None:
        met = ((self._starts == self._recent) | (self._starts == _ANY)).all(-1)
        logits.index_add_(0, self._last, torch.where(met, float("-inf"), 0.0))

    def record(self, token: Tensor) -> None:
        if len(self._recent):
            self._recent = torch.cat((self._recent[1:], token))


class _SlotProcessors:
    """One slot's. `counts` [vocab] float32 of generated tokens, `in_prompt` [vocab] bool; both only for penalties."""

    def __init__(
        self, assignment: SlotAssignment, vocab_size: int, eos_ids: Sequence[int], device: torch.device
    ) -> None:
        sampling = assignment.sampling
        self._sampling = sampling
        self._first_free = assignment.num_prompt + sampling.min_tokens  # the first position at which it may end
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
        self._ends = _ids(sorted(ends) if sampling.min_tokens else [], device)
        self._bias_ids = _ids(list(sampling.logit_bias), device)
        values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._bias = values.to(device, non_blocking=True)
        output = assignment.tokens[assignment.num_prompt :].tolist()
        self._bad = _BadSequences(sampling.bad_token_ids, output, device) if sampling.bad_token_ids else None
        self._forbidden: Tensor | None = None
        if sampling.allowed_token_ids:
            forbidden = torch.ones(vocab_size, dtype=torch.bool)
            forbidden[list(sampling.allowed_token_ids)] = False
            self._forbidden = forbidden.to(device, non_blocking=True)
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None
        if _has_penalties(sampling):
            tokens = torch.from_numpy(assignment.tokens.astype("int64"))
            counts = torch.bincount(tokens[assignment.num_prompt :], minlength=vocab_size)
            self._counts = counts.float().to(device, non_blocking=True)
            in_prompt = torch.bincount(tokens[: assignment.num_prompt], minlength=vocab_size) > 0
            self._in_prompt = in_prompt.to(device, non_blocking=True)

    def apply(self, logits: Tensor, position: int) -> None:
        """Change logits [vocab] float32 of the token at `position` in place."""
        sampling = self._sampling
        if self._counts is not None and self._in_prompt is not None:
            seen = self._counts > 0
            if sampling.repetition_penalty != 1.0:
                penalty = sampling.repetition_penalty
                changed = torch.where(logits > 0, logits / penalty, logits * penalty)
                torch.where(seen | self._in_prompt, changed, logits, out=logits)
            logits -= sampling.frequency_penalty * self._counts
            logits -= sampling.presence_penalty * seen
        if len(self._bias_ids):
            logits.index_add_(0, self._bias_ids, self._bias)
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, float("-inf"))
        may_not_end = len(self._ends) and position < self._first_free
        if self._bad is None and not may_not_end:
            return
        allowed = logits.clone()
        if self._bad is not None:
            self._bad.ban(logits)
        if may_not_end:
            logits.index_fill_(0, self._ends, float("-inf"))
        torch.where(logits.isneginf().all(), allowed, logits, out=logits)

    def record(self, token: Tensor) -> None:
        """`token` [1] was sampled."""
        if self._bad is not None:
            self._bad.record(token)
        if self._counts is not None:
            self._counts.index_add_(0, token, torch.ones(1, device=token.device))


class LogitsProcessors:
    """By request slot; slots that ask for nothing are not in it."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._device = device
        self._slots: dict[int, _SlotProcessors] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        self._slots.pop(assignment.slot, None)
        if assignment.sampling.has_logits_processors:
            self._slots[assignment.slot] = _SlotProcessors(assignment, self._vocab_size, self._eos_ids, self._device)

    def apply(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], mask: Mask | None = None) -> Tensor:
        """logits [n, vocab] of the rows' next tokens, at `positions` -> the same, or a float32 copy, processed; `mask`
        comes first."""
        rows = [row for row, slot in enumerate(slots) if slot in self._slots] if self._slots else []
        if not rows and mask is None:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if mask is not None:
            mask(logits)
        for row in rows:
            self._slots[slots[row]].apply(logits[row], positions[row])
        return logits

    def record(self, tokens: Tensor, slots: Sequence[int]) -> None:
        """`tokens` [n] were sampled."""
        if self._slots:
            for row, slot in enumerate(slots):
                if (processors := self._slots.get(slot)) is not None:
                    processors.record(tokens[row : row + 1])


def _has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty)


def _ids(ids: Sequence[Any], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True)
