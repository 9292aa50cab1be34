"""Which waiting request starts next: the schedule policies.

A policy is a rank, a small function of a request. Of the *candidates* the one with the smallest rank goes first, of
those with the smallest priority; the first in line if there are several. Candidates are the first in line and those
behind it, in the background as it is or not, whose age is less than AGE above its own (with fcfs the first alone).

*Nobody starves.* Of later arrivals, at most AGE - 1 of its own priority start before a request, whatever the policy, at
most (p - q + 1) * AGE - 1 of a priority q that goes before its own p, and none of the others. For while X waits, the
first in line is X or is before it, so its age is at most X's. Hence who starts meanwhile has an age below age(X) + AGE.
The n-th to arrive after X has, with priority q, the age age(X) + n + (q - p) * AGE. So n < (p - q + 1) * AGE. (Who
passes a head without room, `StepPass._let_pass`, is a candidate, too.)

What is cached of a request is looked up when it becomes a candidate, and then remembered: a step looks it up again, of
all candidates, if a request has started since, or after MATCH_STEPS steps. So a step in which nobody can start walks no
tree, however many wait. What is remembered decides who goes first, never what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from minisgl.scheduler.api import AGE
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.scheduler.reference.admission import cached_len
from minisgl.scheduler.reference.radix import RadixTree
from minisgl.scheduler.reference.request import NO_STEP, Request, RequestQueue

MAX_CANDIDATES = AGE  # of several priorities there could be more
MATCH_STEPS = 16


def first_come(request: Request) -> int:
    return 0


def longest_prefix(request: Request) -> int:
    return -request.cached_len


def shortest_prefill(request: Request) -> int:
    return len(request.tokens) - request.cached_len


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

    def next(self, waiting: RequestQueue, tree: RadixTree, step: int) -> Request:
        """Of those that wait, at least one, the one that starts next."""
        if self.policy == "fcfs":
            return waiting.first
        candidates = self.candidates(waiting)
        for request in candidates:
            if self._is_due(request, step):
                request.cached_len, request.matched_in = cached_len(request, tree, step), step
        rank = RANKS[self.policy]
        return min(candidates, key=lambda request: (request.priority, rank(request), request.order))

    def candidates(self, waiting: RequestQueue) -> list[Request]:
        """In line."""
        first = waiting.first

        def may_go_first(request: Request) -> bool:
            return request.is_background == first.is_background and request.age < first.age + AGE

        return list(takewhile(may_go_first, waiting.items[:MAX_CANDIDATES]))

    def _is_due(self, request: Request, step: int) -> bool:
        """Whether what is cached of a candidate is to be looked up. Once a step is enough."""
        then = request.matched_in
        return then == NO_STEP or (then < step and (then <= self.last_start or step - then >= MATCH_STEPS))
