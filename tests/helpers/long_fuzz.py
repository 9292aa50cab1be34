"""Hypothesis for long: many short runs of one property, the seed of each its number: the same every time, and with
`--times` others more.

Invariants: memory stays what one short run needs, for hypothesis remembers all that it has drawn in a run; a run that
is put apart fails at its bound of memory and says so, where it would take the machine's.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from hypothesis import HealthCheck, seed, settings

EXAMPLES_A_RUN = 1000
T = TypeVar("T")
resource_tracker.ensure_running()  # it outlives what is spawned: a file that is asked what it left does not count it


def for_long(check: Callable[..., None], given: Callable[..., Any], config: settings, max_examples: int) -> None:
    """`given`: what `hypothesis.given` returned, not yet put on `check`. A failure is told with the seed of its run."""
    for number in range(-(-max_examples // EXAMPLES_A_RUN)):
        count = min(EXAMPLES_A_RUN, max_examples - number * EXAMPLES_A_RUN)
        others = {"derandomize": False, "database": None, "suppress_health_check": list(HealthCheck)}
        of_run = settings(config, max_examples=count, **others)
        try:
            seed(number)(of_run(given(check)))()
        except BaseException as error:
            error.add_note(f"hypothesis.seed of this run: {number}")
            raise


def apart(work: Callable[..., T], *args: Any, max_bytes: int) -> T:
    """What `work` returns or raises in a process of its own, whose addresses are bounded."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning, initializer=_bound_addresses, initargs=(max_bytes,)) as pool:
        return pool.submit(work, *args).result()


def _bound_addresses(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
