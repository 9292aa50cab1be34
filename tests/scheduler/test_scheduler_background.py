"""Requests in the background: they get what is left, and the others do not notice them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from minisgl.step import Abort, Arrival, Event, Finish
from tests.helpers.scheduler import Driver, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

STEPS = 70
Rows = list[tuple[int, int, int]]  # id, tokens computed, tokens whose KV there is then


def behind(req_id: int, tokens: list[int], max_tokens: int = 1, **options: object) -> Arrival:
    return arrival(req_id, tokens, max_tokens, background=True, **options)


def waits(driver: Driver) -> int:
    found: int = driver.plane.stats().num_waiting
    return found


# ------------------------------------------------------------------------------------------- others don't notice them


def drawn(rng: random.Random) -> list[list[Event]]:
    """Events by step: of both kinds, ordinary ones with even ids; those of one kind have no token in common with those
    of the other."""
    events: list[list[Event]] = []
    next_id = 0
    for _ in range(STEPS):
        events.append([])
        for _ in range(rng.randint(0, 2) if rng.randrange(3) == 0 else 0):
            next_id += 1
            tokens = [rng.randrange(2) + 10 * (next_id % 2) for _ in range(rng.randint(1, 30))]
            one = arrival(next_id, tokens, rng.randint(1, 25), priority=rng.randint(-1, 1) * 20)
            events[-1].append(replace(one, background=next_id % 2 == 1, no_overlap=rng.randrange(6) == 0))
        if next_id and rng.randrange(12) == 0:
            told = rng.randint(1, next_id)
            events[-1].append(Abort(told) if rng.randrange(2) else Finish(told))
    return events


def plans(events: list[list[Event]], config: dict[str, object], overlap: bool) -> tuple[list[Rows], int]:
    """The rows of ordinary requests by step, and how many were retracted."""
    driver = Driver(**config)
    for of_step in events:
        driver.schedule(*of_step)
        while len(driver.uncommitted) > overlap:
            driver.commit()
    found = [[(r.req_id, r.extend_len, r.seq_len) for r in rows if r.req_id % 2 == 0] for rows in driver.rows]
    return found, driver.plane.stats().num_retracted_total


def check_unnoticed(rng: random.Random, config: dict[str, object], overlap: bool) -> int:
    """How many of the background gave way, or of the others were retracted."""
    events = drawn(rng)
    alone = [[e for e in step if not isinstance(e, Arrival) or not e.background] for step in events]
    (with_others, retracted), (without, _) = plans(events, config, overlap), plans(alone, config, overlap)
    for step, (one, two) in enumerate(zip(with_others, without, strict=True)):
        assert one == two, f"step {step}"
    return retracted


def test_plans_are_the_same_beside_the_background_without_a_cache() -> None:
    """Exact: no step computes anything else for the others, admits, sizes or retracts otherwise. Slots and pages lack;
    nothing is in flight when a step is decided, so that a slot is free as soon as it is given up."""
    retracted = 0
    for seed in range(40):
        rng = random.Random(seed)
        config: dict[str, object] = {
            "cache": "naive",
            "num_pages": rng.randint(10, 20),
            "page_size": 4,
            "max_running_requests": rng.randint(1, 5),
            "max_prefill_length": rng.choice((1, 6, 24)),
            "context_len": 60,
        }
        retracted += check_unnoticed(rng, config, overlap=False)
    assert retracted > 40, "the runs are too easy"


def test_plans_are_the_same_with_steps_in_flight_and_enough_slots() -> None:
    """A cache is shared memory: what it holds of the one kind is less for the other. So there is enough of it."""
    for seed in range(20):
        rng = random.Random(seed)
        cache = rng.choice(("naive", "lru", "lfu"))
        config: dict[str, object] = {
            "cache": cache,
            "max_running_requests": 2 * STEPS,
            "max_prefill_length": rng.choice((1, 6, 24)),
            "context_len": 60,
            "num_pages": rng.randint(10, 20) if cache == "naive" else 2000,
        }
        check_unnoticed(rng, config, overlap=True)


# -------------------------------------------------------------------------------------------------- what they do get


def test_it_starts_when_nobody_else_waits() -> None:
    driver = Driver(max_prefill_length=8)
    assert lengths(driver.step(behind(1, [1] * 12), arrival(2, [2] * 12))) == [(2, 8)]
    assert lengths(driver.step()) == [(2, 4), (1, 4)], "what the other leaves of the budget"
    assert lengths(driver.step(arrival(3, [3] * 12))) == [(2, 1), (3, 4)]
    driver.run()
    assert len(driver.tokens[1]) == 1


def test_a_started_one_waits_while_another_prefills_or_waits() -> None:
    driver = Driver(max_prefill_length=8, max_running_requests=2)
    assert lengths(driver.step(behind(1, [1] * 20))) == [(1, 8)]
    assert lengths(driver.step(arrival(2, [2] * 20))) == [(2, 8)], "the whole budget is the other's"
    assert lengths(driver.step()) == [(2, 8)]
    assert lengths(driver.step()) == [(2, 4), (1, 4)]
    assert driver.plane.stats().num_retracted_total == 0


def test_it_decodes_only_when_nobody_else_is_left_waiting() -> None:
    driver = Driver(max_prefill_length=4)
    driver.step(behind(1, [1], max_tokens=20))
    assert lengths(driver.step()) == [(1, 1)]
    assert lengths(driver.step(arrival(2, [2] * 4), arrival(3, [3] * 4))) == [(2, 4)], "3 still waits"
    assert lengths(driver.step()) == [(2, 1), (1, 1), (3, 4)], "nobody else is left"
    driver.run()
    assert len(driver.tokens[1]) == 20


def test_it_gives_its_slot_to_another() -> None:
    driver = Driver(max_running_requests=2)
    driver.step(behind(1, [1], max_tokens=20), behind(2, [2], max_tokens=20))
    assert lengths(driver.step(arrival(3, [3]))) == [(1, 1), (3, 1)], "the last of them went back to waiting"
    assert (driver.plan.num_retracted, waits(driver)) == (1, 1)
    assert lengths(driver.step(arrival(4, [4]), arrival(5, [5]))) == [(3, 1), (4, 1)], "so did the first"
    driver.run()
    assert {req_id: len(tokens) for req_id, tokens in driver.tokens.items()} == {1: 20, 2: 20, 3: 4, 4: 4, 5: 4}
    assert driver.tokens[1] == list(range(1001, 1021)), "no token lost, none repeated"


def test_no_more_slots_are_given_up_than_are_wanted() -> None:
    """A slot of a row in flight is free when its step is committed."""
    driver = Driver(max_running_requests=4)
    driver.step(*[behind(i, [i], max_tokens=30) for i in range(4)])
    driver.schedule()
    driver.schedule(arrival(9, [9]))
    assert driver.plan.num_retracted == 1 and 9 not in [row.req_id for row in driver.rows[-1]]
    driver.commit()
    assert (9, 1) in lengths(driver.schedule())
    assert driver.plan.num_retracted == 0


def test_it_gives_its_pages_to_another_that_would_get_fewer() -> None:
    driver = Driver(num_pages=8, cache="naive", context_len=64)
    driver.step(behind(1, [1] * 20))
    driver.step(behind(2, [2] * 20, max_tokens=10))
    assert lengths(driver.step(arrival(3, [3] * 20))) == [(3, 20)]
    assert driver.plan.num_retracted == 1


def test_it_gives_its_pages_to_a_started_chunk_that_would_be_shorter() -> None:
    driver = Driver(num_pages=7, cache="naive", context_len=64, max_prefill_length=8)
    driver.step(behind(1, [1] * 24))
    driver.step()
    assert lengths(driver.step(arrival(2, [2] * 24))) == [(2, 8)]
    assert driver.plane.stats().num_free_pages == 1
    assert lengths(driver.step()) == [(2, 8)], "two pages"
    assert driver.plan.num_retracted == 1


def test_others_are_admitted_in_the_step_in_which_it_gives_way() -> None:
    driver = Driver(num_pages=6, cache="naive", context_len=64)
    driver.plane.reserve_ratio = 0
    driver.step(arrival(1, [1] * 4, max_tokens=4), behind(2, [2] * 20, max_tokens=9))
    assert driver.plane.stats().num_free_pages == 0
    assert lengths(driver.step(arrival(3, [3]))) == [(1, 1), (3, 1)]
    assert driver.plan.num_retracted == 1


def test_it_gives_way_to_the_estimate_of_another() -> None:
    driver = Driver(num_pages=16, cache="naive")
    driver.step(arrival(1, [1] * 4, max_tokens=24))
    driver.plane.reserve_ratio = 1024
    driver.step(behind(2, [2] * 8, max_tokens=3))
    assert waits(driver) == 0
    assert (3, 12) in lengths(driver.step(arrival(3, [3] * 12, max_tokens=20)))
    assert driver.plan.num_retracted == 1


def test_it_is_retracted_before_anybody_else_and_that_changes_no_estimate() -> None:
    driver = Driver(num_pages=6, context_len=64)
    driver.plane.reserve_ratio = 102
    driver.step(arrival(1, [1] * 8, max_tokens=12), behind(2, [2] * 8, max_tokens=12))
    driver.run()
    assert driver.plane.stats().num_retracted_total >= 1
    assert driver.plane.reserve_ratio == 102
    assert driver.tokens[2] == list(range(1008, 1020))


def test_those_in_the_background_go_by_priority_among_themselves() -> None:
    driver = Driver(max_running_requests=1)
    driver.step(behind(1, [1]), behind(2, [2], priority=-1))
    assert [row.req_id for row in driver.rows[0]] == [2]
    driver.run()


def test_one_that_generated_elsewhere_goes_on() -> None:
    """What a failover tells the scheduler that takes over."""
    driver = Driver(max_pinned_pages=2, num_pages=80)
    driver.step(behind(1, [1] * 8 + [1008, 1009], max_tokens=4, num_generated=2, pin=True))
    driver.run()
    assert driver.tokens[1] == [1010, 1011]
    assert driver.plane.stats().num_pinned_pages == 2
