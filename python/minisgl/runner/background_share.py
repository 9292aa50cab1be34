"""What requests in the background may add to a step beside others, out of what steps took.

Two steps in a row that compute as much for others, and not as much for the background, tell what its tokens cost right
there: between them nothing else has changed. So where a step reads its weights anyway they cost nothing, and many are
taken; where each token takes its time, less than one a step. One step in `LOOK_EVERY` has none in the background, so
that there always are such two.

Invariants: nothing is decided here but `gain`; it grows only to twice of what a step has had.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from minisgl.step import TOKEN_PARTS, StepPlan

SHARE = 0.05  # of a step's time, on average of steps
LOOK_EVERY = 32  # steps with tokens in the background
PAIRS = 64  # of steps, of which the costs are taken
ENOUGH = 4  # of them
OUTLIERS = 32  # one pair in so many, at both ends, does not count: something else on the machine disturbed it
KNOWN = 15  # steps, the median of which is what one takes


class BackgroundShare:
    """`gain`: see `TokenBudget.background`; at most `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens * TOKEN_PARTS
        self._granted = self.gain = TOKEN_PARTS
        self._seconds: deque[float] = deque(maxlen=KNOWN)
        self._pairs: deque[tuple[float, int]] = deque(maxlen=PAIRS)  # seconds more, tokens more
        self._previous = (0, 0, 0.0)  # tokens of others, of the background, seconds
        self._num_steps = 0
        self._largest = 0  # that the background has had in a step since the last look

    def measured(self, plan: StepPlan, seconds: float) -> bool:
        """A step took `seconds`; whether `gain` is another one now."""
        behind = plan.num_background
        others = plan.num_tokens - behind
        (before, before_behind, before_s), before_gain = self._previous, self.gain
        self._previous, self.gain = (others, behind, seconds), self._granted
        if others:
            self._seconds.append(seconds)
            if others == before and behind != before_behind:
                more = behind - before_behind
                self._pairs.append((seconds - before_s, more) if more > 0 else (before_s - seconds, -more))
            if behind:
                self._num_steps += 1
                self._largest = max(self._largest, behind)
                if self._num_steps % LOOK_EVERY == 0:
                    self._look()
                    self.gain = 1  # for one step
        return self.gain != before_gain

    def _look(self) -> None:
        tried = 2 * min(self._granted, self._largest * TOKEN_PARTS)
        self._largest = 0
        if len(self._pairs) < ENOUGH:
            return
        cost_s, step_s = self._token_s(), median_low(self._seconds)
        found = self._most
        if cost_s * self._most > SHARE * step_s * TOKEN_PARTS:
            found = max(1, int(SHARE * step_s / cost_s * TOKEN_PARTS))
        self._granted = min(found, max(self._granted, tried))

    def _token_s(self) -> float:
        """Of one more in the background: least squares, so that steps with many of them count most."""
        pairs = sorted(self._pairs, key=lambda pair: pair[0] / pair[1])
        cut = len(pairs) // OUTLIERS
        kept = pairs[cut : len(pairs) - cut]
        return sum(seconds * tokens for seconds, tokens in kept) / sum(tokens * tokens for _, tokens in kept)
