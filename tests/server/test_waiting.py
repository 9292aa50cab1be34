"""What waits in the gateway counts for the Python server's limits; large bodies take turns."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.config import Limits
from minisgl.frontend.output_processor import OutputProcessor
from minisgl.server.api_keys import KeyUse
from minisgl.server.errors import ApiError
from minisgl.server.waiting import MAX_WAITING, Queue, Turns
from tests.helpers.gateway import Recording

LIMITS = Limits(max_queued_requests=4, max_queued_tokens=100)


def test_limits_count_what_waits_in_the_gateway() -> None:
    gateway = Recording()
    queue = Queue(OutputProcessor(), LIMITS, KeyUse(()), gateway)
    queue.check_room(4, 1000)  # alone
    gateway.found["num_waiting"], gateway.found["num_waiting_tokens"] = 3, 60
    assert queue.num_requests == 3
    queue.check_room(1, 40)
    with pytest.raises(ApiError, match="3 requests wait already, the limit is 4") as too_many:
        queue.check_room(2)
    assert too_many.value.status == 429
    with pytest.raises(ApiError, match="prompts of 60 tokens wait already, the limit is 100"):
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


async def test_who_has_most_large_bodies_waiting_makes_room() -> None:
    turns, held, many = await crowded()
    other = asyncio.create_task(turns.take(1, 2))
    await asyncio.wait([many[-1]])
    error = many[-1].exception()
    assert isinstance(error, ApiError) and error.status == 429
    with pytest.raises(ApiError, match="256 large bodies wait"):
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
