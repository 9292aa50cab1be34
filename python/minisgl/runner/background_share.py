"""What requests in the background may add to a step beside others, out of what steps took.

Two steps in a row that compute as much for others, and not as much for the background, tell what its tokens cost right
there: between them nothing else has changed. So where a step reads its weights anyway they cost nothing, and many are
taken; where each token takes its time, less than one a step. One step in `LOOK_EVERY` has none in the background, so
that there always are such two.

What a token costs on average says little of a large step where the first hundred cost nothing and each one more takes
its time, as on a GPU. So it is known besides how much longer steps were by how many tokens they had (`_Sizes`): where
some keep to their share and larger ones do not, the bound lies between. Such steps are compared with those without any
that came before: where the next one without any says that all steps take another time now, that comparison was wrong,
is forgotten, and what it took from the background is given back.

Invariants: nothing is decided here but `gain`; it grows only to twice of what a step has had, to a quarter more where
that took half of its share; two steps of a size that take too long bring it down at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import log2, sqrt
from statistics import median_low

from minisgl.step import TOKEN_PARTS, StepPlan

SHARE = 0.045  # of a step's time; of several steps' where one token takes more
LOOK_EVERY = 32  # steps with tokens in the background
PAIRS = 64  # of steps, of which the costs are taken
ENOUGH = 4  # of them
OUTLIERS = 32  # one pair in so many, at both ends, does not count: something else on the machine disturbed it
KNOWN = 15  # steps, the median of which is what one takes
SIZES = 4  # of steps, between one number of tokens and twice as many
TWICE = 2  # steps of a size say something
CHANCE = 6  # deviations: a step that differs by more from those of its kind does so for a reason
LATELY = 7  # steps without any, of a kind: they grow with the context
REMEMBERED = 64 * LOOK_EVERY  # steps with tokens in the background; then a size that took too long is tried again


class BackgroundShare:
    """`gain`: see `TokenBudget.background`; at most `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens * TOKEN_PARTS
        self._granted = self.gain = TOKEN_PARTS
        self._granted_before = TOKEN_PARTS  # when a step had none the last time
        self._seconds: deque[float] = deque(maxlen=KNOWN)
        self._pairs: deque[tuple[float, int]] = deque(maxlen=PAIRS)  # seconds more, tokens more
        self._sizes = _Sizes()
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
            if others == before and (behind or before_behind):
                self._compare(others, behind, seconds)
            if behind and self._num_steps % LOOK_EVERY == 0:
                self._look()
                self.gain = 1  # for one step
        return self.gain != before_gain

    def _compare(self, others: int, behind: int, seconds: float) -> None:
        if not behind:
            if self._sizes.without(others, seconds, self._num_steps):
                self._granted = self.gain = max(self._granted, self._granted_before)
            self._granted_before = self._granted
        elif self._sizes.having(others, behind, seconds, self._num_steps) > SHARE and self._granted > TOKEN_PARTS:
            fits, too_long = self._sizes.bounds()
            if too_long:
                self._granted = self.gain = min(self._granted, max(fits, TOKEN_PARTS))

    def _look(self) -> None:
        self._sizes.forget(self._num_steps - REMEMBERED)
        tried = 2 * min(self._granted, self._largest * TOKEN_PARTS)
        if self._sizes.share(self._largest) > SHARE / 2:
            tried = tried * 5 // 8
        self._largest = 0
        if len(self._pairs) < ENOUGH:
            return
        fits, too_long = self._sizes.bounds()
        found = fits if fits and too_long else max(fits, self._by_token())
        if too_long:
            found = min(found, too_long)
        self._granted = min(found, max(self._granted, tried))

    def _by_token(self) -> int:
        """What takes its share if each token takes as long."""
        cost_s, step_s = self._token_s(), median_low(self._seconds)
        if cost_s * self._most <= SHARE * step_s * TOKEN_PARTS:
            return self._most
        return max(1, int(SHARE * step_s / cost_s * TOKEN_PARTS))

    def _token_s(self) -> float:
        """Seconds that one more token in the background takes, by least squares, so that steps with many of them count
        most."""
        pairs = sorted(self._pairs, key=lambda pair: pair[0] / pair[1])
        cut = len(pairs) // OUTLIERS
        kept = pairs[cut : len(pairs) - cut]
        return sum(seconds * tokens for seconds, tokens in kept) / sum(tokens * tokens for _, tokens in kept)


class _Sizes:
    """How much longer steps were, as a share, with so many tokens in the background than with none, with as many of
    others."""

    def __init__(self) -> None:
        self._without: dict[int, deque[tuple[float, int]]] = {}  # by tokens of others: seconds, the step
        self._longer: dict[int, deque[tuple[float, int, int]]] = {}  # by size: a share, tokens, the step

    def without(self, others: int, seconds: float, step: int) -> bool:
        """Whether steps take another time now whatever is in them: others' contexts are longer, or the machine has
        something else to do. What was found since the last one of the kind has that time in it, and is forgotten."""
        if others not in self._without and len(self._without) == KNOWN:
            del self._without[next(iter(self._without))]
        lately = self._without.setdefault(others, deque(maxlen=LATELY))
        usual_s = self._usual_s(others)
        changed = usual_s > 0 and abs(seconds / usual_s - 1) > SHARE + CHANCE * self._deviation()
        if changed:
            _, last = lately[-1]
            self._keep(lambda at: at <= last)
            lately.clear()
        lately.append((seconds, step))
        return changed

    def _usual_s(self, others: int) -> float:
        return median_low(seconds for seconds, _ in self._without[others]) if self._without.get(others) else 0.0

    def having(self, others: int, behind: int, seconds: float, step: int) -> float:
        """The share that it was longer by; 0 where that is not known."""
        without_s = self._usual_s(others)
        if not without_s:
            return 0.0
        share = seconds / without_s - 1
        self._longer.setdefault(_size(behind), deque(maxlen=KNOWN)).append((share, behind, step))
        return share

    def forget(self, step: int) -> None:
        """All before that."""
        self._keep(lambda at: at >= step)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        for size, found in list(self._longer.items()):
            kept = [one for one in found if wanted(one[2])]
            self._longer[size] = deque(kept, maxlen=KNOWN)
            if not kept:
                del self._longer[size]

    def share(self, num_tokens: int) -> float:
        found = self._longer.get(_size(num_tokens))
        return median_low(share for share, _, _ in found) if found else 0.0

    def bounds(self) -> tuple[int, int]:
        """Parts of tokens with which a step keeps to its share, and with which it does not; 0: none are known. A size
        takes too long if all larger ones do, because more tokens never take less time, and by more than chance has it:
        who knows less of it forgives more."""
        known = [found for _, found in sorted(self._longer.items()) if len(found) >= TWICE]
        after, after_share, deviation = 0, 0.0, self._deviation() if known else 0.0
        for found in reversed(known):
            share, tokens = (median_low(one[at] for one in found) for at in (0, 1))
            share -= 2 * deviation / sqrt(len(found))
            if share <= SHARE:
                more = (SHARE - share) / (after_share - share) * (after - tokens) if after else 0.0
                return int((tokens + more) * TOKEN_PARTS), after * TOKEN_PARTS
            after, after_share = int(tokens), share
        return 0, after * TOKEN_PARTS

    def _deviation(self) -> float:
        """By how much a step without any differs from others of its kind, in the middle: what else is on the machine
        disturbs them."""
        seconds = [one for one, _ in max(self._without.values(), key=len)]
        middle = median_low(seconds)
        return median_low(abs(one / middle - 1) for one in seconds) if middle else 0.0


def _size(num_tokens: int) -> int:
    return int(SIZES * log2(num_tokens))
