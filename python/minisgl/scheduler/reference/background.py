"""Token limits for low-priority (background) requests, so that they hardly delay the others. The limit is an input:
`TokenBudget.background`, from the component that measures step times. Integers only.

*Guarantees.* Let the limit be g parts of a token per step, and pages have p tokens. In a step with other requests the
low-priority ones compute at most (g + 1023) / 1024 tokens, except that the last may begin a page that is prefilled
whole; in n consecutive steps at most n * g / 1024 tokens and a page. They also progress: of p * 1024 / g + 1
consecutive steps in which one of them could have a row, at least one has a row of theirs. In a step in which other
requests prefill, g is reduced by the tokens that those compute, but not below a twentieth of them.

Rows are given in request order: the first request gets all that it can use, and the last pauses and keeps its pages,
because only a complete response is of use. So each waits only for those before it, and all finish.
"""

from __future__ import annotations

from minisgl.step import TOKEN_PARTS, UNBOUNDED

PREFILL_SHARE = 20
"""Prefilled tokens of others per low-priority token: where step time grows with tokens, a step with a prompt takes at
most that fraction longer."""


class Background:
    """Token credit of low-priority requests, in parts of a token: `gain` for each step with other requests; `_credit`,
    negative after a page that exceeded it; `_pace`, the credit of a step without other requests."""

    __slots__ = ("_credit", "_pace", "gain")

    def __init__(self) -> None:
        self.gain = UNBOUNDED
        self._credit = 0
        self._pace = UNBOUNDED

    def bound(self, num_ordinary: int, num_prefilled: int) -> int:
        """Return how many tokens low-priority requests may compute in this step. `num_ordinary` is the number of other
        started requests, `num_prefilled` the tokens of the step if those prefill.

        Unused credit is lost except for the fraction of a token. Without other requests the limit grows by a quarter
        per step. So a request that arrives later waits for a step of at most about a quarter of the time since the last
        one, where step time grows with tokens.
        """
        if num_ordinary:
            gain = self.gain
            if num_prefilled and gain < UNBOUNDED:
                others = num_prefilled * TOKEN_PARTS
                gain = min(gain, max(gain - others, others // PREFILL_SHARE))
            self._pace = max(self.gain, TOKEN_PARTS)
            self._credit = min(self._credit, TOKEN_PARTS - 1) + gain
        else:
            self._credit = self._pace
            self._pace = min(self._pace + self._pace // 4, UNBOUNDED)
        return self._credit // TOKEN_PARTS

    def spend(self, num_tokens: int) -> None:
        """Subtract `num_tokens`, which low-priority requests compute in this step, from the credit."""
        self._credit -= num_tokens * TOKEN_PARTS
