"""How much requests in the background may compute in a step, so that others hardly wait for it.

The bound is told as data: `TokenBudget.background`, of whom measures time. Integers only.

*What a request in the background is guaranteed.* Say that the bound is g parts of a token for each step, in pages of p
tokens. In a step that has others they compute at most (g + 1023) / 1024 tokens, the last of which may be the first of a
page that is prefilled with it; in n steps in a row at most n * g / 1024 tokens and a page. And they get on: of
p * 1024 / g + 1 steps in a row in which one could have a row one at least has a row of theirs. In a step in which
others prefill, g is less by what those compute, or a twentieth of that, if that is more.

Rows go by the order of requests: the first has all that it can use, and the last pauses with its pages, because an
answer is of use when it is whole. So each is behind those before it alone, and all come to their ends.
"""

from __future__ import annotations

from minisgl.step import TOKEN_PARTS, UNBOUNDED

PREFILL_SHARE = 20
"""Requests in the background get one token for so many that others compute: a step with a prompt takes as much longer
at most where it takes the longer the more it computes, though a step of few tokens would not."""


class Background:
    """Parts of tokens: `gain` for each step beside others; `_credit` of those in the background, negative after a page
    that they had no credit for; `_pace`, what a step that has nobody else would give them."""

    __slots__ = ("_credit", "_pace", "gain")

    def __init__(self) -> None:
        self.gain = UNBOUNDED
        self._credit = 0
        self._pace = UNBOUNDED

    def bound(self, num_ordinary: int, num_prefilled: int) -> int:
        """Tokens that they may compute in this step, in which `num_ordinary` others have started. `num_prefilled`: the
        tokens of others in it, if those prefill.

        What they do not use is lost but for the fraction of a token. With nobody else there the bound grows by a
        quarter from step to step. So others who come back find a step before them that takes about a quarter of the
        time that they were away at most, where it takes the longer the more it computes.
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
        """They compute so many in this step."""
        self._credit -= num_tokens * TOKEN_PARTS
