"""Hypothesis for long: many short runs of one property, each with a seed of its own.

Keeps true: memory stays what one short run needs. Hypothesis remembers all that it has drawn in a run: one of 40,000
templates took more than 21 GB, and the machine ended the process.
"""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom
from typing import Any

from hypothesis import HealthCheck, seed, settings

EXAMPLES_A_RUN = 1000


def for_long(check: Callable[..., None], given: Callable[..., Any], config: settings, max_examples: int) -> None:
    """`given`: what `hypothesis.given` returned, not yet put on `check`. A failure is told with the seed of its run."""
    first = SystemRandom().randrange(2**32)
    for number in range(-(-max_examples // EXAMPLES_A_RUN)):
        count = min(EXAMPLES_A_RUN, max_examples - number * EXAMPLES_A_RUN)
        others = {"derandomize": False, "database": None, "suppress_health_check": list(HealthCheck)}
        of_run = settings(config, max_examples=count, **others)
        try:
            seed(first + number)(of_run(given(check)))()
        except BaseException as error:
            error.add_note(f"hypothesis.seed of this run: {first + number}")
            raise
