"""Ageing: a later request of smaller priority goes first only so often."""

from __future__ import annotations

import random

import pytest

from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")

AGE = 64  # written out: it is what clients are told


def starts(driver: Driver) -> list[int]:
    """Requests in the order of their first admission; within a step by their slots' order of assignment."""
    found: dict[int, None] = {}
    for rows in driver.rows:
        found.update(dict.fromkeys(row.req_id for row in rows))
    return list(found)


def overtaken(order: list[int], priorities: dict[int, int]) -> list[tuple[int, int, int]]:
    """(request, priority q, how many later ones of q went before it); ids are in order of arrival."""
    place = {req_id: at for at, req_id in enumerate(order)}
    found = []
    for req_id, priority in priorities.items():
        later = [other for other in order[: place[req_id]] if other > req_id]
        found += [(req_id, q, sum(priorities[other] == q for other in later)) for q in range(-3, priority + 1)]
    return found


def test_a_step_of_priority_is_worth_64_arrivals() -> None:
    driver = Driver(max_running_requests=1)
    driver.step(arrival(0, [1], max_tokens=1, priority=1), *(arrival(i, [1], max_tokens=1) for i in range(1, 100)))
    driver.run()
    order = starts(driver)
    assert order.index(0) == AGE - 1, "those that came up to 63 arrivals later"
    assert [req_id for req_id in order if req_id] == list(range(1, 100))


def test_of_two_of_one_age_the_smaller_id_goes_first() -> None:
    for ids in ((5, 7), (7, 5)):
        driver = Driver(max_running_requests=1)
        others = [arrival(100 + i, [1], max_tokens=1) for i in range(AGE - 1)]
        driver.step(arrival(ids[0], [1], 1, priority=1), *others, arrival(ids[1], [1], 1))
        driver.run()
        assert starts(driver)[-2:] == [5, 7]


@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_overtaken_more_often_than_priorities_allow(seed: int) -> None:
    """Several times as much comes as can be served, for long."""
    rng = random.Random(seed)
    driver = Driver(max_running_requests=rng.randint(1, 3), num_pages=64)
    priorities: dict[int, int] = {}
    while len(priorities) < 500:
        events = []
        for _ in range(rng.randint(0, 5)):
            priorities[len(priorities)] = priority = rng.choice((-3, -1, 0, 0, 0, 1, 2))
            events.append(arrival(len(priorities) - 1, [rng.randrange(9)], rng.randint(1, 3), priority=priority))
        driver.step(*events)
    driver.run(overlap=True)
    order = starts(driver)
    assert sorted(order) == sorted(priorities)
    worst = 0
    for req_id, q, count in overtaken(order, priorities):
        assert count <= (priorities[req_id] - q) * AGE, f"request {req_id} was overtaken by {count} of priority {q}"
        worst = max(worst, count)
    assert worst > AGE // 2, "the run is too easy"


def test_a_stream_of_preferred_requests_starves_no_request() -> None:
    """One request is served at a time, and each step brings another one that is preferred."""
    driver = Driver(max_running_requests=1)
    driver.step(arrival(-1, [1], max_tokens=1), arrival(-2, [2], max_tokens=1, priority=3))
    steps = 0
    while -2 not in driver.tokens:
        driver.step(arrival(steps, [3], max_tokens=1))
        steps += 1
        assert steps <= 3 * AGE + 2
    assert steps >= 3 * AGE - 2, "its priority means something"


def test_background_arrivals_do_not_age_other_requests() -> None:
    driver = Driver(max_running_requests=1)
    behind = [arrival(1000 + i, [1], max_tokens=1, background=True) for i in range(2 * AGE)]
    driver.step(arrival(-1, [1], max_tokens=2), arrival(0, [1], max_tokens=1, priority=1), *behind, arrival(1, [1], 1))
    driver.run()
    assert starts(driver) == [-1, 1, 0, *range(1000, 1000 + 2 * AGE)]
