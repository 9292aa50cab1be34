"""Which waiting request starts next: the schedule policies.

A policy is a rank, a small function of a request. Of the *candidates* the one with the smallest rank goes first, of
those with the smallest priority; the first in line if there are several. Candidates are the first in line and those
behind it, in the background as it is or not, whose age is less than the policy's *window* W above its own: AGE with
lpm, 16 times that with srpf, and with fcfs the first alone.

*Nobody starves.* Of later arrivals, at most W - 1 of its own priority start before a request, and at most W - 1 +
(p - q) * AGE of a priority q beside its own p. For while X waits, the first in line is X or is before it, so its age is
at most X's. Hence who starts meanwhile has an age below age(X) + W. The n-th to arrive after X has, with priority q,
the age age(X) + n + (q - p) * AGE. So n < W + (p - q) * AGE. (Who passes a head without room, `StepPass._let_pass`, is
a candidate, too. None of a priority behind X's starts before it otherwise.)

*Nor does work pile up.* With srpf who overtakes X, unless it passes a head, has fewer tokens to compute than X, and
fewer than SHORT, as far as is remembered: of those with more the first in line goes first. So X waits for fewer than
W * SHORT tokens of others.

What is cached of a request is looked up when it becomes a candidate, and then remembered: a step looks it up again
after MATCH_STEPS steps, with lpm also if a request has started since; MAX_LOOK_UPS at once, the others in later steps.
So a step in which nobody can start walks hardly a tree, however many wait. What is remembered decides who goes first,
never what it gets.
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
"""How many ages the candidates are of, and at most how many they are: of several priorities there could be more."""
SHORT = 1024  # tokens
MATCH_STEPS = 16
MAX_LOOK_UPS = 64


def first_come(request: Request) -> int:
    return 0


def longest_prefix(request: Request) -> int:
    return -request.cached_len


def shortest_prefill(request: Request) -> int:
    """Those that are not short are alike."""
    return min(len(request.tokens) - request.cached_len, SHORT)


RANKS: dict[SchedulePolicy, Callable[[Request], int]] = {
    "fcfs": first_come,
    "lpm": longest_prefix,
    "srpf": shortest_prefill,
}


class Ranking:
    """`last_start` is the last step in which a request has started."""

    __slots__ = ("last_start", "policy")

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self.last_start = NO_STEP

    def next(self, waiting: RequestQueue, tree: PrefixTree, step: int) -> Request:
        """The one that starts next of those that wait, at least one."""
        if self.policy == "fcfs":
            return waiting.first
        candidates = self.candidates(waiting)
        for request in islice((one for one in candidates if self._is_due(one, step)), MAX_LOOK_UPS):
            request.cached_len, request.matched_in = cached_len(request, tree, step), step
        rank = RANKS[self.policy]
        return min(candidates, key=lambda request: (request.priority, rank(request), request.order))

    def candidates(self, waiting: RequestQueue) -> list[Request]:
        """In line."""
        first, window = waiting.first, WINDOWS[self.policy]

        def may_go_first(request: Request) -> bool:
            return request.is_background == first.is_background and request.age < first.age + window

        return list(takewhile(may_go_first, waiting.items[:window]))

    def _is_due(self, request: Request, step: int) -> bool:
        """Whether what is cached of a candidate is to be looked up. Once a step is enough."""
        then = request.matched_in
        follows = self.policy == "lpm" and then <= self.last_start
        return then == NO_STEP or (then < step and (follows or step - then >= MATCH_STEPS))
