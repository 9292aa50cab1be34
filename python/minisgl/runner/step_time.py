"""Adapts the token budget of a step so that no step takes longer than requested. The scheduler has no clock: it gets
the result as an event, so a trace of its calls has all inputs.

Invariants: the only output is a `TokenBudget`; steps are small until one was measured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median_low

from minisgl.runner.background_share import BackgroundShare
from minisgl.step import StepPlan, TokenBudget

FIRST_TOKENS = 32  # token limit of a step before the first measurement
ALONE = 4  # factor for steps without decode rows: only new requests wait for them
EFFICIENT, ENOUGH = 5, 2  # multiples of a decode-only step: reading weights is a small part of it, or half
MOST = 1.6  # limit, in multiples of the requested time, for an efficient step
KEPT = 3  # measurements whose median counts: one outlier has no effect


class StepTime:
    """Controller of step times. `step_s`: limit in seconds while rows decode (`None`: no limit). `max_tokens`: token
    limit of a step, however fast it is. Prefill chunks end at page boundaries, so half a page is added to a budget to
    reach the limit on average."""

    def __init__(self, step_s: float | None, max_tokens: int, page_size: int = 1) -> None:
        self._step_s = step_s
        self._half_page = page_size // 2
        self._max_tokens = max_tokens
        self._token_s: deque[float] = deque(maxlen=KEPT)
        self._decode_s: deque[float] = deque(maxlen=KEPT)
        self._share = BackgroundShare(max_tokens)
        first = max_tokens if step_s is None else min(FIRST_TOKENS, max_tokens)
        self.budget = TokenBudget(first, first, self._share.gain)
        """Current token budget."""

    def measured(self, plan: StepPlan, seconds: float) -> bool:
        """Record that the step of `plan` took `seconds`. Returns whether `budget` has changed."""
        before = self.budget
        if self._share.measured(plan, seconds):
            self.budget = replace(before, background=self._share.gain)
        if self._step_s is not None:
            self._measured(plan, seconds, self._step_s)
        return self.budget != before

    def _measured(self, plan: StepPlan, seconds: float, step_s: float) -> None:
        """Update the cost per token from a whole step, including its decode rows and fixed costs; it grows with the
        context. So the next step comes closer to its limit whatever the costs consist of. A step that was neither full
        nor too long says nothing about a full one."""
        if plan.num_rows == plan.num_decode_rows:
            if plan.num_rows:
                self._decode_s.append(seconds)
            return
        longest_s = self._longest_s(step_s)
        is_short = plan.num_decode_rows or plan.num_background == plan.num_tokens
        full = self.budget.beside_decode if is_short else self.budget.prefill_only
        if 2 * plan.num_tokens < full and seconds < longest_s:
            return
        self._token_s.append(seconds / plan.num_tokens)
        self.budget = TokenBudget(self._num_tokens(longest_s), self._num_tokens(ALONE * longest_s), self._share.gain)

    def _longest_s(self, step_s: float) -> float:
        """Return the limit in seconds of a step with decode rows. Each step reads all weights and decodes one token per
        row, so prefill is inefficient in steps that are hardly longer than that. So on a slow machine a step may take
        somewhat longer than requested, and if decoding alone takes all of the time, prompts get as much again."""
        decode_s = median_low(self._decode_s) if self._decode_s else 0.0
        return max(step_s, ENOUGH * decode_s, min(EFFICIENT * decode_s, MOST * step_s))

    def _num_tokens(self, seconds: float) -> int:
        token_s = median_low(self._token_s)
        if token_s * self._max_tokens <= seconds:
            return self._max_tokens
        return max(1, int(seconds / token_s) + self._half_page)
