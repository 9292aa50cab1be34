"""Who goes for whom: by hand, and under random tenants against all choices there are."""

from __future__ import annotations

import itertools
import random

from minisgl.registry.room import Move, Room, Tenant, make_room, move, never_fits, retry_after_s, victims


def test_the_least_recently_used_goes_first_and_no_more_than_must() -> None:
    there = [Tenant("a", 10, used=3), Tenant("b", 10, used=1), Tenant("c", 10, used=2)]
    assert victims(40, there, 10) == []
    assert victims(30, there, 10) == ["b"]
    assert victims(30, there, 15) == ["b", "c"]
    assert victims(30, there, 31) is None


def test_small_model_stays_if_a_large_one_must_go() -> None:
    there = [Tenant("small", 1, used=1), Tenant("large", 20, used=2)]
    assert victims(25, there, 20) == ["large"]


def test_serving_or_pinned_model_stays() -> None:
    there = [
        Tenant("busy", 10, used=1, busy=True),
        Tenant("pinned", 10, used=2, pinned=True),
        Tenant("idle", 10, used=3),
    ]
    assert victims(30, there, 10) == ["idle"]
    assert victims(30, there, 20) is None
    assert victims(30, there, 20, even_busy=True) == ["idle", "busy"]
    assert victims(30, there, 30, even_busy=True) is None
    assert never_fits(30, there, 21) and not never_fits(30, there, 20)


def test_random_tenants(times: int) -> None:
    rng = random.Random(7)
    for _ in range(300 * times):
        there = [
            Tenant(str(i), rng.randint(1, 20), used, rng.random() < 0.2, rng.random() < 0.3)
            for i, used in enumerate(rng.sample(range(100), rng.randint(0, 6)))
        ]
        budget, need = sum(one.need for one in there) + rng.randint(-5, 10), rng.randint(0, 40)
        going = victims(budget, there, need)
        movable = [one for one in there if not one.pinned and not one.busy]
        free = budget - sum(one.need for one in there)
        if going is None:
            assert free + sum(one.need for one in movable) < need
            continue
        gone = {one for one in movable if one.name in going}
        assert len(gone) == len(going) == len(set(going))
        assert free + sum(one.need for one in gone) >= need
        for fewer in range(len(gone)):  # none of them could have stayed
            assert all(free + sum(one.need for one in some) < need for some in itertools.combinations(gone, fewer)), (
                there,
                going,
            )


def test_a_busy_model_gives_way_once_it_was_waited_for_as_long_as_it_takes_to_load() -> None:
    busy, idle = Tenant("a", 10, used=1, busy=True), Tenant("a", 10, used=1)
    full = Room(15, 10, [busy])
    assert make_room(full, 10) is None
    assert move(full, 10, 0.5, {"a": 3.0}) == Move(again_s=2.5)
    assert move(full, 10, 3.0, {"a": 3.0}) == Move(leave=["a"])
    assert move(Room(15, 10, [idle]), 10, 0.0, {}) == Move(unload=["a"])
    assert move(Room(15, 10, []), 10, 0.0, {}) == Move(unload=[])  # until what is being unloaded is gone
    assert move(Room(20, 10, [busy]), 10, 0.0, {}) == Move(load=True, unload=[])


def test_a_load_that_failed_is_tried_again_after_twice_the_time() -> None:
    assert [retry_after_s(number) for number in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 60.0]
