"""What waits in the gateway counts for the Python server's limits; large bodies take turns."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.config import Limits
from minisgl.frontend.output_processor import OutputProcessor
from minisgl.server.core.api_keys import KeyUse
from minisgl.server.core.errors import ApiError
from minisgl.server.core.waiting import MAX_WAITING, Queue, Turns, has_room
from tests.helpers.gateway import Recording

LIMITS = Limits(max_queued_requests=4, max_queued_tokens=100)


def test_limits_count_what_waits_in_the_gateway() -> None:
    gateway = Recording()
    queue = Queue(OutputProcessor(), LIMITS, KeyUse(()), gateway)
    queue.check_room(4, 1000)  # alone
    gateway.found["num_waiting"], gateway.found["num_waiting_tokens"] = 3, 60
    assert queue.num_requests == 3
    queue.check_room(1, 40)
    with pytest.raises(ApiError, match="3 requests are queued, the limit is 4") as too_many:
        queue.check_room(2)
    assert too_many.value.status == 429
    with pytest.raises(ApiError, match="60 prompt tokens are queued, the limit is 100"):
        queue.check_room(1, 41)
    assert queue.num_in_flight() == 0 and gateway.num_readings == 0, "no more is read than is asked for"


async def test_owners_of_large_bodies_take_turns() -> None:
    """Whoever has many of them keeps others waiting for one."""
    turns, order = Turns(10, lambda _: None), list[int]()

    async def one(owner: int) -> None:
        held = await turns.take(10, owner)
        order.append(owner)
        await asyncio.sleep(0)
        turns.give(held)

    await asyncio.gather(*(one(owner) for owner in (1, 1, 1, 1, 2, 2, 3)))
    assert order == [1, 1, 2, 3, 1, 2, 1]
    assert (turns.num_waiting, turns.num_bytes) == (0, 0)


async def crowded() -> tuple[Turns, int, list[asyncio.Task[int]]]:
    """What owner 1 has in hand, and all of its turns that may wait."""
    turns = Turns(1, lambda _: None)
    held = await turns.take(1, 1)
    many = [asyncio.create_task(turns.take(1, 1)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    return turns, held, many


async def test_owner_with_most_waiting_bodies_loses_the_newest() -> None:
    turns, held, many = await crowded()
    other = asyncio.create_task(turns.take(1, 2))
    await asyncio.wait([many[-1]])
    error = many[-1].exception()
    assert isinstance(error, ApiError) and error.status == 429
    with pytest.raises(ApiError, match="256 large request bodies"):
        await turns.take(1, 1)
    turns.give(held)
    turns.give(await many[0])
    assert await other == 1 and not many[1].done(), "it is the other owner's turn"
    for task in many[1:-1]:
        task.cancel()
    await asyncio.gather(*many[1:-1], return_exceptions=True)
    turns.give(1)
    assert (turns.num_waiting, turns.num_bytes) == (0, 0)


async def test_who_makes_room_and_leaves_in_the_same_moment_gives_nothing_back() -> None:
    turns, held, many = await crowded()
    other = asyncio.create_task(turns.take(1, 2))
    await asyncio.sleep(0)
    for task in (*many, other):  # the last of many has no room any more, and does not know it yet
        task.cancel()
    await asyncio.gather(*many, other, return_exceptions=True)
    assert turns.num_bytes == held
    turns.give(held)
    assert (turns.num_waiting, turns.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("most", "owners", "held", "by_all", "more", "may"),
    [
        (8, 1, 7, 7, 1, True),  # alone: all of it
        (8, 1, 8, 8, 1, False),
        (8, 1, 0, 0, 100, True),  # larger than the room: where nothing is
        (8, 2, 3, 3, 1, True),
        (8, 2, 4, 4, 1, False),  # half of it is left to the other
        (8, 2, 0, 4, 4, True),
        (8, 2, 0, 8, 4, True),  # its own part, however much others hold
        (8, 2, 0, 8, 5, False),
        (8, 4, 3, 6, 1, False),
        (8, 4, 1, 6, 1, True),
        (2, 9, 0, 2, 1, True),  # one, where there are fewer places than owners
    ],
)
def test_every_owner_gets_capacity(most: int, owners: int, held: int, by_all: int, more: int, may: bool) -> None:
    assert has_room(most, owners, held, by_all, more) is may


@given(st.integers(1, 20), st.integers(2, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=60))
def test_capacity_is_bounded_and_every_owner_gets_some(most: int, owners: int, asked: list[tuple[int, int]]) -> None:
    held = [0] * owners
    largest = 0  # what went alone
    for number, more in asked:
        owner = number % owners
        if has_room(most, owners, held[owner], sum(held), more):
            largest = max(largest, more if not sum(held) else 0)
            held[owner] += more
    assert sum(held) <= 2 * most + owners + largest
    assert all(one or has_room(most, owners, one, sum(held), 1) for one in held)
