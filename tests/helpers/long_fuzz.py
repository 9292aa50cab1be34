"""Long runs of Hypothesis: many short runs of one property, each seeded by its index, so reproducible; `--times` adds
more.

Invariants: memory stays that of one short run, because hypothesis remembers everything drawn in a run; a run in a
process of its own fails at its memory limit with an error, before it takes the machine's memory.
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
resource_tracker.ensure_running()  # it outlives spawned processes, so tests that look for leftovers must not count it


def for_long(check: Callable[..., None], given: Callable[..., Any], config: settings, max_examples: int) -> None:
    """Run `check` for `max_examples` in short runs; a failure names its run's seed. `given`: what `hypothesis.given`
    returned."""
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
    """Run `work` in a process with a limited address space; return or raise its result."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning, initializer=_bound_addresses, initargs=(max_bytes,)) as pool:
        return pool.submit(work, *args).result()


def _bound_addresses(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
