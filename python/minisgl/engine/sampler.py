"""Sampling in torch, from a forward's hidden states and logits to results: logits processors (penalties, bias, allowed
tokens, bad words, min_tokens), sampled tokens, log probabilities of the model's own distribution, pooled embeddings.

Rows pay only for the features that they use. Prompt tokens go through the head in chunks, so that a long prompt does
not need [tokens, vocab] logits at once.

Invariants: greedy is the exact argmax, the lowest id on ties; otherwise a token is a function of its row's logits,
parameters, seed and position only, whatever else is in the batch. Rows without a processor keep their logits bit for
bit; token counts follow the tokens in forward order, even before the host knows the tokens; a slot that is reassigned
starts from the sequence of its assignment; some token can always be sampled. Embeddings are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.engine.api import Embedding, PromptLogprobs, SlotAssignment, StepLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.step import RingEntry, StepPlan

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def truncate(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the top_k most likely tokens, then all but the smallest set of these whose share reaches top_p
    (nucleus sampling, Holtzman et al. 2019). Ties go to the lower id."""
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    beyond_k = (top_k > 0)[:, None] & (rank >= top_k[:, None])
    ordered = ordered.masked_fill(beyond_k, 0.0)
    mass = ordered.cumsum(-1, dtype=torch.float64)
    before = mass - ordered
    limit = top_p.double()[:, None] * mass[:, -1:]
    ordered = ordered.masked_fill((before >= limit) & (rank > 0) & (top_p < 1)[:, None], 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, ids, ordered)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first id whose cumulative probability exceeds `uniform` times the total."""
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    chosen = torch.searchsorted(cdf, uniform[:, None] * total, right=True).squeeze(-1)
    # rounding may make the target the total: then the last token with a nonzero probability is chosen
    last = torch.searchsorted(cdf, total, right=False).squeeze(-1)
    return torch.minimum(chosen, last)


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """Return random values, [n] float64 in [0, 1), by splitmix64 of `seed` and `position`, [n] int64 each."""
    bits = _finalize(_finalize(seed) ^ (position * _GOLDEN))
    return _shift(bits, 11).double() * 2.0**-53


def _finalize(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shift right logically: torch's shift is arithmetic."""
    return (x >> count) & ((1 << (64 - count)) - 1)


Mask = Callable[[Tensor], None]
"""Grammar mask: sets logits [n, vocab] float32 of ids that the rows' grammars forbid to -inf, in place."""
_ANY = -1  # padding of a shorter sequence: matches any id
_NONE = -2  # before the output's first token: matches no id


class _BadSequences:
    """Token sequences that the output must not contain: the last id is banned when the output ends with the others."""

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
    """The logits processors of one slot. Only penalties need `counts` [vocab] float32 and `in_prompt` [vocab] bool."""

    def __init__(
        self, assignment: SlotAssignment, vocab_size: int, eos_ids: Sequence[int], device: torch.device
    ) -> None:
        sampling = assignment.sampling
        self._sampling = sampling
        self._first_free = assignment.num_prompt + sampling.min_tokens  # first position at which an end is allowed
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
            prompt = tokens[: assignment.num_prompt]
            in_prompt = torch.bincount(prompt[prompt < vocab_size], minlength=vocab_size) > 0  # without virtual ids
            self._in_prompt = in_prompt.to(device, non_blocking=True)

    def apply(self, logits: Tensor, position: int) -> None:
        """Change in place the logits [vocab] float32 of the token at `position`."""
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
        """Update the processors with the sampled `token` [1]."""
        if self._bad is not None:
            self._bad.record(token)
        if self._counts is not None:
            self._counts.index_add_(0, token, torch.ones(1, device=token.device))


class LogitsProcessors:
    """Logits processors by request slot; slots that need none have no entry."""

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
        """Apply `mask`, then the processors of each row's slot to logits [n, vocab] of the tokens at `positions`.
        Returns the input itself if there is nothing to apply, else a float32 copy."""
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
        """Update the processors of `slots` with their sampled `tokens` [n]."""
        if self._slots:
            for row, slot in enumerate(slots):
                if (processors := self._slots.get(slot)) is not None:
                    processors.record(tokens[row : row + 1])


def _has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty)


def _ids(ids: Sequence[Any], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64).to(device, non_blocking=True)


_CHUNK = 128  # prompt positions that go through the head at once


class LogprobSlots:
    """Log probabilities that each request slot asks for: -1 for none, else the number of alternatives."""

    def __init__(self, num_slots: int) -> None:
        self._sampled = np.full(num_slots, -1, np.int32)
        self._prompts: dict[int, SlotAssignment] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        sampling = assignment.sampling
        self._sampled[assignment.slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._prompts.pop(assignment.slot, None)
        if sampling.prompt_logprobs is not None:
            self._prompts[assignment.slot] = assignment

    def sampled(
        self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], logits: Tensor, chosen: Tensor
    ) -> Callable[[], StepLogprobs] | None:
        """Compute log probabilities of the tokens `chosen` [m] in `rows` [m] with `logits` [m, vocab] on the device.
        Returns a function that copies them to the host, to be called after the step; None if no row asked for any."""
        wanted = self._sampled[slots]
        indexes = np.flatnonzero(wanted >= 0)
        if not len(indexes):
            return None
        at = torch.from_numpy(indexes).to(logits.device, non_blocking=True)
        counts = wanted[indexes].tolist()
        top_tensors = _top(logits[at], chosen[at], max(counts))

        def fetch() -> StepLogprobs:
            token_logprobs, top_ids, top_logprobs = _to_lists(top_tensors)
            return StepLogprobs(
                rows=rows[indexes].astype(np.int32),
                token_logprobs=token_logprobs,
                top_ids=[ids[:count] for ids, count in zip(top_ids, counts, strict=True)],
                top_logprobs=[values[:count] for values, count in zip(top_logprobs, counts, strict=True)],
            )

        return fetch

    def prompts(
        self, plan: StepPlan, entry: RingEntry, hidden: Tensor, head: Callable[[Tensor], Tensor]
    ) -> list[Callable[[], PromptLogprobs]]:
        """Compute on the device the log probabilities of the prompt tokens that follow those in this step. `hidden` is
        [num_tokens, size]. The functions returned copy them to the host."""
        deferred = []
        for row in range(plan.num_rows) if self._prompts else ():
            assignment = self._prompts.get(int(entry.req_slots[row]))
            if assignment is None:
                continue
            start, end = int(entry.qo_indptr[row]), int(entry.qo_indptr[row + 1])
            first = int(entry.positions[start]) + 1
            count = min(end - start, assignment.num_prompt - first)
            if count > 0:
                deferred.append(_score_prompt(assignment, first, hidden[start : start + count], head))
        return deferred


def _score_prompt(
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
        token_logprobs: list[float] = []
        top_ids: list[list[int]] = []
        top: list[list[float]] = []
        for chunk in chunks:
            lists = _to_lists(chunk)
            token_logprobs += lists[0]
            top_ids += lists[1]
            top += lists[2]
        return PromptLogprobs(assignment.req_id, first, token_logprobs, top_ids, top)

    return fetch


def _top(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probabilities of `tokens` [n], and the `count` most likely ids with theirs, most likely first."""
    logprobs = logits.float().log_softmax(-1)
    token_logprobs = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return token_logprobs, top.indices, top.values


def _to_lists(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[list[float], list[list[int]], list[list[float]]]:
    token_logprobs, ids, values = tensors
    return token_logprobs.tolist(), ids.tolist(), values.tolist()


@dataclass(slots=True, eq=False)
class _Pool:
    assignment: SlotAssignment
    total: Tensor | None = None


class EmbeddingSlots:
    """Pooled embeddings in progress, by request slot."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def assign(self, assignment: SlotAssignment) -> None:
        self._pools.pop(assignment.slot, None)
        if assignment.sampling.embedding is not None:
            self._pools[assignment.slot] = _Pool(assignment)

    def deferred(self, plan: StepPlan, entry: RingEntry, hidden: Tensor) -> list[Callable[[], Embedding]]:
        """Add this step's prompt tokens, `hidden` [num_tokens, size], to their pools on the device. Returns functions
        that copy to the host the embeddings of prompts whose last token is in this step."""
        embeddings = list[Callable[[], Embedding]]()
        for row in range(plan.num_rows) if self._pools else ():
            pool = self._pools.get(int(entry.req_slots[row]))
            if pool is None:
                continue
            start, end = int(entry.qo_indptr[row]), int(entry.qo_indptr[row + 1])
            left = pool.assignment.num_prompt - int(entry.positions[start])  # tokens of the prompt from here on
            if left <= 0:
                continue
            kind, ends = pool.assignment.sampling.embedding, left <= end - start
            if kind == "mean":
                chunk = hidden[start : min(end, start + left)].sum(0, dtype=torch.float32)
                pool.total = chunk if pool.total is None else pool.total + chunk
            elif kind == "cls" and entry.positions[start] == 0:
                pool.total = hidden[start].float()
            elif kind == "last" and ends:
                pool.total = hidden[start + left - 1].float()
            if ends and pool.total is not None:
                numbers = pool.total / (pool.assignment.num_prompt if kind == "mean" else 1)
                embeddings.append(partial(_embedding, pool.assignment.req_id, numbers))
        return embeddings


def _embedding(req_id: int, numbers: Tensor) -> Embedding:
    return Embedding(req_id, numbers.cpu().numpy())
