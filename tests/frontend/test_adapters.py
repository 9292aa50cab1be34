"""What a front end knows of adapters, from what engines say."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from minisgl.frontend.adapters import AdapterBook
from minisgl.message import AdapterChanged, LoadAdapter, ToEngine, UnloadAdapter


@dataclass
class World:
    serving: list[int]
    sent: list[ToEngine] = field(default_factory=list)
    num_changes: int = 0

    def __post_init__(self) -> None:
        self.book = AdapterBook(self.sent.append, lambda: self.serving, self._changed)

    def _changed(self) -> None:
        self.num_changes += 1


@pytest.fixture
def world() -> World:
    return World([0, 1])


def test_a_name_is_there_when_every_engine_has_it(world: World) -> None:
    one = world.book.load("sql", "a")
    assert world.sent == [LoadAdapter(1, "sql", "a")]
    assert world.book.number("sql") is None and not world.book.is_settled(one)
    world.book.take(1, AdapterChanged(1, "loaded"))
    assert world.book.number("sql") is None
    world.book.take(0, AdapterChanged(1, "loaded"))
    assert (world.book.number("sql"), world.book.is_settled(one)) == (1, True)
    assert world.num_changes == 2


def test_an_engine_that_is_lost_is_not_waited_for(world: World) -> None:
    world.book.load("sql", "a")
    world.book.take(1, AdapterChanged(1, "loaded"))
    world.serving.remove(0)
    world.book.lost(0)
    assert world.book.number("sql") == 1
    world.serving.clear()
    world.book.load("chat", "b")
    world.book.lost(1)
    assert world.book.number("chat") is None, "with no engine there is one to wait for"


def test_an_adapter_that_one_engine_refuses_is_unloaded_from_all(world: World) -> None:
    one = world.book.load("sql", "a")
    world.book.take(0, AdapterChanged(1, "loaded"))
    world.book.take(1, AdapterChanged(1, "refused", "no such folder"))
    assert (world.book.is_settled(one), one.refusal) == (True, "no such folder")
    assert world.sent[1:] == [UnloadAdapter(1)] and world.book.by_name == {}
    again = world.book.load("sql", "a")
    world.book.take(0, AdapterChanged(1, "loaded"))  # of the first, late
    world.book.take(1, AdapterChanged(1, "unloaded"))
    assert (again.number, again.said) == (2, {})


def test_an_adapter_that_an_engine_refuses_later_is_unloaded(world: World) -> None:
    """It comes back, and its folder is gone."""
    one = world.book.load("sql", "a")
    for engine in (0, 1):
        world.book.take(engine, AdapterChanged(1, "loaded"))
    world.book.lost(1)
    assert world.book.number("sql") == 1
    world.book.take(1, AdapterChanged(1, "refused", "gone"))
    assert world.book.number("sql") is None and not one.is_ready
    assert (world.sent[-1], world.book.number("sql")) == (UnloadAdapter(1), None)


def test_unloading_is_at_once_and_idempotent(world: World) -> None:
    one = world.book.load("sql", "a")
    for engine in (0, 1):
        world.book.take(engine, AdapterChanged(1, "loaded"))
    world.book.unload(one)
    world.book.unload(one)
    assert world.sent[1:] == [UnloadAdapter(1)] and world.book.ready() == []
    assert world.book.load("sql", "a").number == 2, "a number is never used again"
