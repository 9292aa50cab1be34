"""Measures how many low-priority (background) tokens a step may have besides other requests' tokens.

Two consecutive steps with equally many tokens of other requests but different low-priority ones show what the latter
cost: nothing else has changed between them. So in steps that are bound by reading the weights they cost nothing and
many are allowed; where each token takes time, less than one per step. One step in `LOOK_EVERY` has none, so that such
pairs always exist.

The average cost per token says little about a large step in which the first hundred tokens are free and each further
one takes time, as on a GPU. So `_Sizes` also records how much longer steps were, by their number of tokens: if some
sizes stay within the share and larger ones do not, the limit lies between. Steps are compared with earlier ones without
low-priority tokens; if the next such step shows that all steps now take another time, the comparison was wrong and its
effect on the limit is undone.

Invariants: the only decision is `gain`; it grows at most to twice what a step has used, or by a quarter if that took
half of its share; two steps of a size that take too long lower it at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import log2, sqrt
from statistics import median_low

from minisgl.step import TOKEN_PARTS, StepPlan

SHARE = 0.045  # fraction of a step's time; of several steps' if one token takes more
LOOK_EVERY = 32  # interval of comparison, in steps with low-priority tokens
PAIRS = 64  # pairs of steps from which the cost is computed
ENOUGH = 4  # fewest pairs for that
OUTLIERS = 32  # one in this many pairs at each end is ignored as noise
KNOWN = 15  # steps whose median is the usual time
SIZES = 4  # size classes per doubling of the tokens
TWICE = 2  # fewest steps of a size that count
CHANCE = 6  # deviations that are no longer noise
LATELY = 7  # recent steps without low-priority tokens, per kind: times grow with the context
REMEMBERED = 64 * LOOK_EVERY  # low-priority steps after which a size that took too long is tried again


class BackgroundShare:
    """Adapts `gain`, the limit in `TokenBudget.background` (at most `max_tokens`), to the measured step times."""

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens * TOKEN_PARTS
        self._granted = self.gain = TOKEN_PARTS
        self._granted_before = TOKEN_PARTS  # at the last step without low-priority tokens
        self._seconds: deque[float] = deque(maxlen=KNOWN)
        self._pairs: deque[tuple[float, int]] = deque(maxlen=PAIRS)  # (additional seconds, additional tokens)
        self._sizes = _Sizes()
        self._previous = (0, 0, 0.0)  # tokens of others, low-priority tokens, seconds
        self._num_steps = 0
        self._largest = 0  # most low-priority tokens in a step since the last `_look`

    def measured(self, plan: StepPlan, seconds: float) -> bool:
        """Record that the step of `plan` took `seconds`. Returns whether `gain` has changed."""
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
        limit = fits if fits and too_long else max(fits, self._by_token())
        if too_long:
            limit = min(limit, too_long)
        self._granted = min(limit, max(self._granted, tried))

    def _by_token(self) -> int:
        """Return the limit in parts of a token if every token costs the same time."""
        cost_s, step_s = self._token_s(), median_low(self._seconds)
        if cost_s * self._most <= SHARE * step_s * TOKEN_PARTS:
            return self._most
        return max(1, int(SHARE * step_s / cost_s * TOKEN_PARTS))

    def _token_s(self) -> float:
        """Return the seconds that one more low-priority token takes, by least squares: steps with many count most."""
        pairs = sorted(self._pairs, key=lambda pair: pair[0] / pair[1])
        cut = len(pairs) // OUTLIERS
        trimmed = pairs[cut : len(pairs) - cut]
        return sum(seconds * tokens for seconds, tokens in trimmed) / sum(tokens * tokens for _, tokens in trimmed)


class _Sizes:
    """Records by which fraction steps with low-priority tokens were longer than steps with as many other tokens."""

    def __init__(self) -> None:
        self._without: dict[int, deque[tuple[float, int]]] = {}  # (seconds, step) by tokens of others
        self._longer: dict[int, deque[tuple[float, int, int]]] = {}  # (fraction, tokens, step) by size class

    def without(self, others: int, seconds: float, step: int) -> bool:
        """Record a step without low-priority tokens. Returns whether steps take another time now for other reasons,
        such as longer contexts or load on the machine; then the comparisons since the last such step are dropped."""
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
        """Record a step with `behind` low-priority tokens. Returns the fraction of time it was longer; 0 if unknown."""
        without_s = self._usual_s(others)
        if not without_s:
            return 0.0
        share = seconds / without_s - 1
        self._longer.setdefault(_size(behind), deque(maxlen=KNOWN)).append((share, behind, step))
        return share

    def forget(self, step: int) -> None:
        """Drop all comparisons before step `step`."""
        self._keep(lambda at: at >= step)

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        for size, measurements in list(self._longer.items()):
            remaining = [measurement for measurement in measurements if wanted(measurement[2])]
            self._longer[size] = deque(remaining, maxlen=KNOWN)
            if not remaining:
                del self._longer[size]

    def share(self, num_tokens: int) -> float:
        measurements = self._longer.get(_size(num_tokens))
        return median_low(share for share, _, _ in measurements) if measurements else 0.0

    def bounds(self) -> tuple[int, int]:
        """Return the largest limit that stays within the share and the smallest that does not, in parts of a token; 0
        where none is known. A size takes too long only if all larger sizes do, since more tokens never take less time,
        and if the excess is more than noise: few measurements are given more tolerance."""
        sizes = [measurements for _, measurements in sorted(self._longer.items()) if len(measurements) >= TWICE]
        after, after_share, deviation = 0, 0.0, self._deviation() if sizes else 0.0
        for measurements in reversed(sizes):
            share, tokens = (median_low(measurement[at] for measurement in measurements) for at in (0, 1))
            share -= 2 * deviation / sqrt(len(measurements))
            if share <= SHARE:
                more = (SHARE - share) / (after_share - share) * (after - tokens) if after else 0.0
                return int((tokens + more) * TOKEN_PARTS), after * TOKEN_PARTS
            after, after_share = int(tokens), share
        return 0, after * TOKEN_PARTS

    def _deviation(self) -> float:
        """Return the noise of the machine: the median relative deviation of steps without low-priority tokens."""
        seconds = [value for value, _ in max(self._without.values(), key=len)]
        middle = median_low(seconds)
        return median_low(abs(value / middle - 1) for value in seconds) if middle else 0.0


def _size(num_tokens: int) -> int:
    return int(SIZES * log2(num_tokens))
