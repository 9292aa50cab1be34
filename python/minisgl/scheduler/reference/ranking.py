"""Schedule policies: they choose which waiting request starts next.

A policy is a rank, a small function of a request. Among the *candidates* the smallest priority goes first, then the
smallest rank, then the first in the queue. Candidates are the first request in the queue and those after it,
low-priority like it or not, whose age is less than the policy's *window* W above its own: W is AGE with lpm, 16 * AGE
with srpf, and 1 with fcfs, which leaves the first only.

*No request starves.* Of later arrivals, at most W - 1 with its own priority start before a request, and at most W - 1 +
(p - q) * AGE with priority q before one with priority p. Proof: while X waits, the first in the queue is X or precedes
X, so its age is at most X's. Hence a request that starts meanwhile has an age below age(X) + W. The n-th to arrive
after X has, with priority q, the age age(X) + n + (q - p) * AGE. So n < W + (p - q) * AGE. (A request that passes a
queue head that lacks memory, `StepPass._admit_small`, is a candidate, too. None with a priority after X's starts before
it otherwise.)

*Work does not pile up either.* With srpf a request that overtakes X, unless it passes a head, has fewer tokens to
compute than X, and fewer than SHORT, by the remembered counts: all longer ones rank equal, in queue order. So X waits
for fewer than W * SHORT tokens of other requests.

The cached length of a request is looked up when it becomes a candidate, and then remembered: it is looked up again
after MATCH_STEPS steps, with lpm also after a request has started; at most MAX_LOOK_UPS per step. So a step in which
nothing can start hardly searches the tree, however many requests wait. Remembered lengths decide the order only, never
what a request gets.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, takewhile

from minisgl.scheduler.api import AGE
from minisgl.scheduler.parts import PrefixTree
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.scheduler.reference.admission import cached_len
from minisgl.scheduler.reference.request import NO_STEP, Request, RequestQueue

WINDOWS: dict[SchedulePolicy, int] = {"fcfs": 1, "lpm": AGE, "srpf": 16 * AGE}
"""Range of the candidates' ages, and their greatest number: with several priorities more could share the range."""
SHORT = 1024  # tokens
MATCH_STEPS = 16
MAX_LOOK_UPS = 64


def first_come(request: Request) -> int:
    return 0


def longest_prefix(request: Request) -> int:
    return -request.cached_len


def shortest_prefill(request: Request) -> int:
    """Return the number of tokens to compute, at most SHORT, so that all long prompts rank equal."""
    return min(len(request.tokens) - request.cached_len, SHORT)


RANKS: dict[SchedulePolicy, Callable[[Request], int]] = {
    "fcfs": first_come,
    "lpm": longest_prefix,
    "srpf": shortest_prefill,
}


class Ranking:
    """Chooses the next waiting request by the policy. `last_start` is the last step in which a request started."""

    __slots__ = ("last_start", "policy")

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self.last_start = NO_STEP

    def next(self, waiting: RequestQueue, tree: PrefixTree, step: int) -> Request:
        """Return the request that starts next. `waiting` must not be empty."""
        if self.policy == "fcfs":
            return waiting.first
        candidates = self.candidates(waiting)
        for request in islice((candidate for candidate in candidates if self._is_due(candidate, step)), MAX_LOOK_UPS):
            request.cached_len, request.matched_in = cached_len(request, tree, step), step
        rank = RANKS[self.policy]
        return min(candidates, key=lambda request: (request.priority, rank(request), request.order))

    def candidates(self, waiting: RequestQueue) -> list[Request]:
        """Return the candidates, in queue order."""
        first, window = waiting.first, WINDOWS[self.policy]

        def may_go_first(request: Request) -> bool:
            return request.is_background == first.is_background and request.age < first.age + window

        return list(takewhile(may_go_first, waiting.items[:window]))

    def _is_due(self, request: Request, step: int) -> bool:
        """Return whether the cached length of a candidate must be looked up in `step`: at most once per step."""
        then = request.matched_in
        follows = self.policy == "lpm" and then <= self.last_start
        return then == NO_STEP or (then < step and (follows or step - then >= MATCH_STEPS))
