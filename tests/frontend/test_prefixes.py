"""What a front end makes of several engines' answers about their caches, in any order, also of those that are lost."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from minisgl.frontend.prefixes import PrefixBook
from minisgl.message import (
    AddPrefix,
    CacheCleared,
    ClearCache,
    EngineStats,
    PrefixChanged,
    PrefixState,
    RemovePrefix,
    ToEngine,
)

TOKENS = np.arange(40, dtype=np.int32)
NONE = EngineStats(*[0] * 11)


class Engines:
    """`serving` may be changed; `posted` is what the engines were sent."""

    def __init__(self, *numbers: int) -> None:
        self.serving: dict[int, EngineStats | None] = dict.fromkeys(numbers)
        self.posted: list[ToEngine] = []
        self.book = PrefixBook(self.posted.append, lambda: self.serving)

    def say(self, engine: int, prefix_id: int, state: str, reason: str = "") -> None:
        self.book.take(engine, PrefixChanged(prefix_id, state, reason))

    def lose(self, engine: int) -> None:
        del self.serving[engine]
        self.book.lost(engine)


@pytest.fixture
def engines() -> Engines:
    return Engines(0, 1)


def test_a_prefix_is_ready_when_the_last_engine_has_it(engines: Engines) -> None:
    book = engines.book
    prefix = book.insert(TOKENS, pin=True)
    assert engines.posted == [AddPrefix(1, TOKENS.tobytes(), True)]
    engines.say(0, 1, "warming")
    assert not book.is_answered(prefix)
    engines.say(1, 1, "warming")
    assert book.is_answered(prefix) and not book.is_settled(prefix)
    engines.say(1, 1, "ready")
    assert not book.is_settled(prefix) and (prefix.state(0), prefix.state(1)) == ("warming", "ready")
    engines.say(0, 1, "ready")
    assert book.is_settled(prefix)
    engines.say(0, 1, "warming")  # its cache was lost
    assert not book.is_settled(prefix)
    assert book.insert(TOKENS, pin=False).prefix_id == 2


def test_one_engine_s_refusal_counts_for_all(engines: Engines) -> None:
    prefix = engines.book.insert(TOKENS, pin=True)
    engines.say(1, 1, "refused", "no room")
    assert engines.book.is_answered(prefix) and engines.book.is_settled(prefix)
    assert prefix.refusal is not None and prefix.refusal.reason == "no room"
    engines.book.remove(prefix)
    engines.book.remove(prefix)
    assert engines.posted[1:] == [RemovePrefix(1)]
    engines.say(1, 1, "unknown")
    assert not engines.book.is_removed(prefix)
    engines.say(0, 1, "ready")  # it was on its way
    engines.say(0, 1, "removed")
    assert engines.book.is_removed(prefix)


def test_no_order_waits_for_a_lost_engine(engines: Engines) -> None:
    book = engines.book
    prefix, gone = book.insert(TOKENS, pin=True), book.insert(TOKENS, pin=True)
    for number in (1, 2):
        engines.say(0, number, "ready")
    book.remove(gone)
    clearing = book.clear()
    engines.say(0, 2, "removed")
    book.take(0, CacheCleared(5))
    assert not (book.is_settled(prefix) or book.is_removed(gone) or book.is_cleared(clearing))
    engines.lose(1)
    assert book.is_settled(prefix) and book.is_removed(gone) and book.is_cleared(clearing)
    engines.serving[1] = None  # it is back, and the pool has told it what it should have
    assert not book.is_settled(prefix) and book.is_cleared(clearing) and clearing.num_pages == {0: 5, 1: 0}
    engines.say(1, 1, "ready")
    assert book.is_settled(prefix)


def test_an_order_without_serving_engines_is_not_answered(engines: Engines) -> None:
    prefix = engines.book.insert(TOKENS, pin=True)
    engines.say(0, 1, "ready")
    engines.lose(0)
    engines.lose(1)
    assert not engines.book.is_settled(prefix) and not engines.book.is_answered(prefix)


def test_answers_to_two_orders_to_clear_come_in_order(engines: Engines) -> None:
    first, second = engines.book.clear(), engines.book.clear()
    assert engines.posted == [ClearCache(), ClearCache()]
    for engine, num_pages in ((1, 7), (1, 1), (0, 4)):
        engines.book.take(engine, CacheCleared(num_pages))
    assert engines.book.is_cleared(first) and not engines.book.is_cleared(second)
    engines.book.take(0, CacheCleared(2))
    assert (first.num_pages, second.num_pages) == ({1: 7, 0: 4}, {1: 1, 0: 2})
    engines.book.take(0, CacheCleared(2))  # somebody else's


def test_hits_are_those_of_the_last_figures(engines: Engines) -> None:
    prefix = engines.book.insert(TOKENS, pin=True)
    assert engines.book.num_hits(prefix) == {}
    prefixes = (PrefixState(9, 4, True, True, 3), PrefixState(1, 40, True, True, 8))
    engines.serving[0] = msgspec.structs.replace(NONE, prefixes=prefixes)
    engines.serving[1] = NONE
    assert engines.book.num_hits(prefix) == {0: 8, 1: 0}


def test_listeners_are_called_after_each_change(engines: Engines) -> None:
    heard: list[str] = []
    with engines.book.listening(lambda: heard.append("a")), engines.book.listening(lambda: heard.append("b")):
        engines.book.insert(TOKENS, pin=True)
        engines.say(0, 1, "warming")
        engines.book.take(0, CacheCleared(1))
        engines.lose(1)
    engines.say(0, 1, "ready")
    assert heard == ["a", "b"] * 3
