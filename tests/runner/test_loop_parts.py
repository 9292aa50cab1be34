"""Parts of the scheduler that break while the loop runs: no stream notices, and each failover is counted."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import PART_NAMES
from minisgl.scheduler.reference import PYTHON, Parts, ReferenceControlPlane
from minisgl.scheduler.rust_parts import Guarded, make_parts
from tests.runner import test_request_tracker as failover


@pytest.mark.parametrize("part", ["admission", "metadata"])
def test_a_function_that_breaks_is_replaced_in_the_same_step(part: str) -> None:
    def function(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 40:
            raise OverflowError("on order")
        return twin(*arguments, **named)

    calls: list[int] = []
    made = make_parts(PART_NAMES)
    twin = made.plan_chunks if part == "admission" else made.make_metadata
    plan = Guarded(function, PYTHON.plan_chunks) if part == "admission" else made.plan_chunks
    make = Guarded(function, PYTHON.make_metadata) if part == "metadata" else made.make_metadata
    plane = ReferenceControlPlane(failover.CONFIG, parts=Parts(made.tree, plan, make, PART_NAMES))
    clients, loop = failover.drive(None, plane, 3, overlap=True)
    failover.check(clients, 3)
    left = ",".join(name for name in PART_NAMES if name != part)
    assert loop.failovers == [(f"rust_parts:{left}", part, "OverflowError")]
    assert loop.control_plane is plane and len(calls) == 40 and loop.num_failovers == 1


def test_a_prefix_cache_that_breaks_ends_its_scheduler() -> None:
    plane: Any = make_control_plane("rust_parts", failover.CONFIG)
    original = plane.step_pass.decide

    def decide(step: int) -> Any:
        if step == 40:
            plane.state.tree.release(10**6)  # no node of it: a panic in Rust
        return original(step)

    plane.step_pass.decide = decide
    clients, loop = failover.drive(None, plane, 3, overlap=True)
    failover.check(clients, 3)
    assert loop.failovers == [("rust_parts:radix,admission,metadata", "radix", "ControlPlaneError")]
    assert "panic" in loop.failover_reason and loop.control_plane is not plane
    loop.control_plane.check()
