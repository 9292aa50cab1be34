"""Real panics of the Rust scheduler, in an extension that is built for it: an error, a dead object, and a failover
that no stream notices."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minisgl import _rust
from minisgl.scheduler.api import ControlPlaneError
from minisgl.step import Arrival, Events, StepBuffers
from tests.runner import test_request_tracker as failover

pytestmark = pytest.mark.timeout(900)  # the extension may have to be built
MOMENTS = ("before", "amid", "after")


def plane_of(module: ModuleType) -> Any:
    return module.ControlPlane(failover.CONFIG, StepBuffers(failover.CONFIG.limits()))


def test_what_is_served_has_no_such_feature(panicking: ModuleType) -> None:
    assert _rust.build_info()["features"] == [] and not hasattr(_rust.ControlPlane, "panic_at")
    assert panicking.build_info() == _rust.build_info() | {"profile": "debug", "features": ["test-panics"]}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("call", ["schedule", "commit"])
def test_a_panic_is_an_error_and_the_object_is_dead(panicking: ModuleType, call: str, moment: str) -> None:
    plane = plane_of(panicking)
    plane.panic_at(call, 1, moment)
    arrival = Arrival(0, np.array([5, 6], np.int32), 2, 9)
    plane.commit(0, np.full(plane.schedule(0, Events([arrival])).num_rows, 7, np.int32))
    with pytest.raises(ControlPlaneError, match=f"panic: {call.capitalize()} 1 panics on order"):
        plane.commit(1, np.full(plane.schedule(1, Events()).num_rows, 7, np.int32))
    for again in (lambda: plane.schedule(2, Events()), lambda: plane.commit(1, arrival.tokens), plane.check):
        with pytest.raises(ControlPlaneError, match="dead"):
            again()


def no_stream_notices(module: ModuleType, seeds: range, overlap: bool) -> None:
    rng = random.Random(f"{seeds} {overlap}")
    for seed in seeds:
        order = (rng.choice(("schedule", "commit")), rng.randrange(1, 120), rng.choice(MOMENTS))
        plane = plane_of(module)
        plane.panic_at(*order)
        clients, loop = failover.drive(None, plane, seed, overlap=overlap)
        try:
            failover.check(clients, seed)
            assert loop.num_failovers == 1 and "panics on order" in loop.failover_reason
            after = loop.control_plane
            after.check()
            stats = after.stats()
            assert stats.num_live == stats.num_held_pages == stats.num_draining == 0
            assert stats.num_free_pages + stats.num_evictable_pages == failover.CONFIG.num_pages
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {order}: {error}") from error


@pytest.mark.parametrize("overlap", [True, False])
def test_no_stream_notices_a_panic(panicking: ModuleType, overlap: bool) -> None:
    no_stream_notices(panicking, range(20), overlap)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_no_stream_notices_200_panics(panicking: ModuleType, overlap: bool) -> None:
    no_stream_notices(panicking, range(1000, 1200), overlap)
