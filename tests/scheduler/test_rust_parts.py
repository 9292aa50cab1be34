"""A scheduler with parts in Rust: which there are, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minisgl.scheduler.api import ControlPlaneConfig, PartFailed
from minisgl.scheduler.backend import choose, make_control_plane
from minisgl.scheduler.parts import Parts
from minisgl.scheduler.policies import PART_NAMES
from minisgl.scheduler.reference import PYTHON, ReferenceControlPlane
from minisgl.scheduler.rust_parts import Guarded, make_parts, parse_parts
from minisgl.step import Events
from tests.helpers.scheduler import arrival

CONFIG = ControlPlaneConfig(16, 4, 4, 16, 64)


def test_names_choose_parts() -> None:
    assert parse_parts("rust_parts") == PART_NAMES
    assert parse_parts("rust_parts:metadata,radix") == ("radix", "metadata")
    with pytest.raises(ValueError, match=r"unknown part 'tree'; valid: radix, admission, metadata"):
        choose("rust_parts:tree", CONFIG)
    assert choose("rust_parts:radix", CONFIG).name == "rust_parts:radix"


def fails(*_: object, **__: object) -> Any:
    raise TypeError("an int, not a str")


@pytest.mark.parametrize("part", ["admission", "metadata"])
def test_the_twin_answers_in_the_same_call(part: str) -> None:
    parts = make_parts(PART_NAMES)
    plan = Guarded(fails, PYTHON.plan_chunks) if part == "admission" else parts.plan_chunks
    make = Guarded(fails, PYTHON.make_metadata) if part == "metadata" else parts.make_metadata
    plane = ReferenceControlPlane(CONFIG, parts=Parts(parts.tree, plan, make, PART_NAMES))
    plane.schedule(0, Events([arrival(1, [5, 6, 7])]))
    output = plane.commit(0, np.array([9], np.int32))
    assert output.tokens.tolist() == [9]
    assert plane.part_failures == {part: "TypeError: an int, not a str"}
    assert plane.backend == "rust_parts:" + ",".join(name for name in PART_NAMES if name != part)


@pytest.mark.parametrize(
    "wrong", [lambda tree: tree.match(10**6, [1, 2, 3, 4], 0, 1), lambda tree: tree.free([3])], ids=["panic", "page"]
)
def test_a_failed_prefix_cache_raises_part_failed(wrong: Callable[[Any], None]) -> None:
    """A number that is no node panics in Rust; a page that nobody took is a bad argument."""
    plane = ReferenceControlPlane(CONFIG, parts=make_parts(["radix"]))
    plane.schedule(0, Events([arrival(1, [5, 6, 7])]))
    original = plane.step_pass.decide
    plane.step_pass.decide = lambda step: (wrong(plane.state.tree), original(step))[1]  # type: ignore[method-assign]
    with pytest.raises(PartFailed) as failed:
        plane.schedule(1, Events([]))
    assert failed.value.part == "radix"
    with pytest.raises(Exception, match="dead"):
        plane.schedule(2, Events([]))


def test_the_check_sees_a_page_that_the_cache_lost() -> None:
    plane: Any = make_control_plane("rust_parts", CONFIG)
    plane.check()
    plane.state.tree.take(1)
    with pytest.raises(PartFailed, match="have no owner"):
        plane.check()
