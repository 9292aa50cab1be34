"""Members that come and go keep the rules of the pool's router."""

from __future__ import annotations

import numpy as np

from minisgl.ray.placement import MAX_MEMBERS, Placement
from minisgl.step import Int32Array

LOAD = {"num_waiting": 0, "num_running": 0, "kv_tokens": 131_072}


def text(*parts: str) -> Int32Array:
    return np.frombuffer("".join(parts).encode(), np.uint8).astype(np.int32)


def test_a_known_prefix_goes_where_it_is() -> None:
    placement = Placement[str]()
    placement.update({"a": LOAD, "b": LOAD, "c": LOAD})
    talk = "a long talk about everything " * 20
    first = placement.place(0, text(talk, "one"))
    placement.remove(0)
    for number in range(1, 4):  # others, so that turns move on
        placement.place(number, text(str(number) * 500))
    assert placement.place(9, text(talk, "two")) == first


def test_without_a_prefix_the_least_load_wins() -> None:
    placement = Placement[str]()
    placement.update({"a": LOAD, "b": LOAD})
    assert {placement.place(0, text("")), placement.place(1, text(""))} == {"a", "b"}


def test_a_member_that_others_use_counts_as_busy() -> None:
    placement = Placement[str]()
    placement.update({"a": LOAD, "b": LOAD})
    placement.update({"a": LOAD | {"num_running": 30}, "b": LOAD})
    assert [placement.place(i, text("")) for i in range(5)] == ["b"] * 5


def test_removed_member_is_never_chosen_and_holds_nothing() -> None:
    placement = Placement[str]()
    placement.update({"a": LOAD, "b": LOAD})
    for number in range(4):
        placement.place(number, text(""))
    placement.leave("a")
    assert placement.load("a") == 0
    assert [placement.place(i, text("")) for i in range(4, 8)] == ["b"] * 4
    placement.update({"b": LOAD, "c": LOAD})
    assert placement.place(8, text("")) == "c"
    placement.leave("b")
    placement.leave("c")
    assert placement.place(9, text("")) is None


def test_more_members_than_numbers() -> None:
    placement = Placement[int]()
    placement.update({i: {} for i in range(MAX_MEMBERS + 3)})
    assert placement.place(0, text("x")) is not None
    placement.update({i: {} for i in range(MAX_MEMBERS, MAX_MEMBERS + 3)})
    assert placement.place(1, text("x")) in range(MAX_MEMBERS, MAX_MEMBERS + 3)
