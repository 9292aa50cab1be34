"""Schedule policies: who of the waiting starts next, and that nobody is overtaken more often than the bound says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.reference.radix import RadixTree
from minisgl.step import Abort, Arrival, ClearCache, Event, Events, ForwardFailed
from tests.helpers.scheduler import Driver, arrival

AGE = 64  # written out: it is what clients are told
WINDOW = {"lpm": 64, "srpf": 1024}
POLICIES = ("fcfs", "lpm", "srpf")
Factory = Callable[[ControlPlaneConfig], ControlPlane]


def order_of_starts(driver: Driver) -> list[int]:
    """By the first assignment of a slot."""
    return list(driver.view.cached_len)


def one_at_a_time(policy: str, **config: object) -> Driver:
    """One row at a time, which a request that ends at once leaves to the next."""
    return Driver(max_running_requests=1, schedule_policy=policy, **config)


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


# ------------------------------------------------------------------------------------------------------ each policy


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", [0, 1, 2, 3, 4]), ("lpm", [0, 3, 4, 2, 1])])
@pytest.mark.usefixtures("each_control_plane")
def test_the_longest_cached_prefix_goes_first(policy: str, expected: list[int]) -> None:
    driver = one_at_a_time(policy)
    driver.step(arrival(0, tokens(100, 33), max_tokens=1))
    known = [tokens(100, 4), tokens(100, 12), tokens(100, 32), tokens(100, 32)]
    driver.step(*(arrival(1 + i, [*begin, 7, 8, 9], max_tokens=1) for i, begin in enumerate(known)))
    driver.run()
    assert order_of_starts(driver) == expected


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", [0, 1, 2, 3]), ("srpf", [0, 3, 2, 1])])
@pytest.mark.usefixtures("each_control_plane")
def test_the_shortest_prefill_goes_first_and_what_is_cached_counts(policy: str, expected: list[int]) -> None:
    driver = one_at_a_time(policy)
    driver.step(arrival(0, tokens(100, 41), max_tokens=1))
    prompts = (tokens(500, 20), tokens(600, 9), tokens(100, 44))  # the last is 40 cached tokens and 4 more
    driver.step(*(arrival(1 + i, prompt, max_tokens=1) for i, prompt in enumerate(prompts)))
    driver.run()
    assert order_of_starts(driver) == expected


@pytest.mark.usefixtures("each_control_plane")
def test_pages_that_can_be_loaded_count_as_cached() -> None:
    driver = one_at_a_time("srpf")
    driver.step(arrival(0, [1], max_tokens=2))
    driver.step(
        arrival(1, tokens(100, 20), max_tokens=1),
        arrival(2, tokens(200, 40), max_tokens=1, stored_from=0, stored_to=8),
    )
    driver.run()
    assert order_of_starts(driver) == [0, 2, 1]


@pytest.mark.parametrize(("num_steps", "first"), [(6, 3), (22, 2)])
@pytest.mark.usefixtures("each_control_plane")
def test_what_is_cached_is_remembered_for_16_steps(num_steps: int, first: int) -> None:
    """Two wait for memory when what is cached of the second goes."""
    driver = Driver(schedule_policy="lpm", num_pages=16)
    driver.step(arrival(0, tokens(100, 13), max_tokens=1))
    driver.step(arrival(1, tokens(200, 40), max_tokens=num_steps))
    driver.step(arrival(2, tokens(300, 30), max_tokens=1), arrival(3, tokens(100, 30), max_tokens=1))
    driver.step(ClearCache())
    driver.run()
    assert order_of_starts(driver)[2] == first


@pytest.mark.parametrize("policy", ["lpm", "srpf"])
@pytest.mark.usefixtures("each_control_plane")
def test_a_policy_does_not_undo_a_priority(policy: str) -> None:
    driver = one_at_a_time(policy)
    driver.step(arrival(0, tokens(100, 20), max_tokens=2))
    driver.step(
        arrival(1, tokens(100, 20), max_tokens=1),  # most of it cached, little to compute
        arrival(2, tokens(200, 50), max_tokens=1, priority=-1),
        arrival(3, tokens(300, 60), max_tokens=1, priority=-1),
    )
    driver.run()
    assert order_of_starts(driver)[-1] == 1


@pytest.mark.parametrize("policy", ["lpm", "srpf"])
@pytest.mark.usefixtures("each_control_plane")
def test_the_background_stays_behind(policy: str) -> None:
    driver = one_at_a_time(policy)
    driver.step(arrival(0, tokens(100, 20), max_tokens=2))
    driver.step(
        arrival(1, tokens(300, 40), max_tokens=1, background=True),
        arrival(2, tokens(100, 20), max_tokens=1, background=True),
        arrival(3, tokens(200, 50), max_tokens=1),
    )
    driver.run()
    assert order_of_starts(driver) == [0, 3, 2, 1]


# -------------------------------------------------------------------------------------------------- past a head


def a_head_without_room(policy: str, *behind: Arrival) -> Driver:
    """One decodes for 12 steps more, in 10 of 20 pages; for the next in rank 11 more would be set aside."""
    driver = Driver(schedule_policy=policy, num_pages=20)
    driver.step(arrival(0, tokens(200, 36), max_tokens=14))
    driver.step(arrival(1, tokens(300, 3), max_tokens=60), *behind)
    return driver


@pytest.mark.parametrize(("policy", "passes"), [("fcfs", False), ("lpm", True), ("srpf", True)])
@pytest.mark.usefixtures("each_control_plane")
def test_a_small_one_passes_a_head_that_memory_is_lacking_for(policy: str, passes: bool) -> None:
    driver = a_head_without_room(policy, arrival(2, tokens(400, 5), max_tokens=9))
    assert (2 in driver.view.cached_len) == passes
    driver.run()
    assert order_of_starts(driver) == ([0, 2, 1] if passes else [0, 1, 2])


@pytest.mark.usefixtures("each_control_plane")
def test_who_would_be_there_when_the_head_has_room_does_not_pass() -> None:
    driver = a_head_without_room("srpf", arrival(2, tokens(400, 5), max_tokens=14))
    driver.run()
    assert order_of_starts(driver) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("each_control_plane")
def test_the_head_starts_when_it_would_have(seed: int) -> None:
    """Small ones come in every step; all end by their limits."""
    draw = random.Random(seed)
    started = []
    for passing in (False, True):
        driver = a_head_without_room("lpm")
        for at in range(30):
            lens = draw.randrange(1, 9), draw.randrange(1, 16)
            driver.step(*([arrival(10 + at, tokens(1000 + 99 * at, lens[0]), max_tokens=lens[1])] if passing else []))
            if 1 in driver.view.cached_len:
                break
        assert (len(driver.view.cached_len) > 2) == passing
        started.append(driver.next_step)
    assert started[0] == started[1]


# --------------------------------------------------------------------------------------------------------- the bound


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.usefixtures("each_control_plane")
def test_a_stream_of_short_prompts_overtakes_a_long_one_1023_times(background: bool) -> None:
    driver = one_at_a_time("srpf", num_pages=128)
    driver.step(arrival(-1, [5], max_tokens=2, background=background))
    driver.step(arrival(0, tokens(100, 60), max_tokens=1, background=background))
    at = 0
    while 0 not in driver.view.cached_len:
        at += 1
        assert at < 3 * WINDOW["srpf"]
        driver.step(arrival(at, [at], max_tokens=1, background=background))
    driver.run()
    assert order_of_starts(driver).index(0) == 1 + WINDOW["srpf"] - 1


@pytest.mark.usefixtures("each_control_plane")
def test_a_stream_of_known_prompts_overtakes_an_unknown_one_63_times() -> None:
    driver = one_at_a_time("lpm", num_pages=128)
    driver.step(arrival(-1, tokens(500, 9), max_tokens=2))
    driver.step(arrival(0, tokens(100, 9), max_tokens=1))
    at = 0
    while 0 not in driver.view.cached_len:
        at += 1
        assert at < 3 * AGE
        driver.step(arrival(at, tokens(500, 9), max_tokens=1))
    driver.run()
    assert order_of_starts(driver).index(0) == 1 + WINDOW["lpm"] - 1


@pytest.mark.usefixtures("each_control_plane")
def test_prompts_that_are_not_short_overtake_nobody() -> None:
    """Else of many that wait the longest would wait for all."""
    driver = one_at_a_time("srpf", num_pages=2048, context_len=4096, max_prefill_length=4096)
    driver.step(arrival(0, [1], max_tokens=2))
    lens = (3000, 1025, 2000, 1023, 1024, 900)
    driver.step(*(arrival(1 + i, tokens(10_000 * i, length), max_tokens=1) for i, length in enumerate(lens)))
    driver.run()
    assert order_of_starts(driver) == [0, 6, 4, 1, 2, 3, 5]


def arrivals_of(draw: random.Random, of_family: float) -> Iterator[list[Arrival]]:
    """By step: short and long prompts, so many of a few families, of several priorities; sometimes many at once."""
    families = [[draw.randrange(9) for _ in range(draw.randrange(4, 60))] for _ in range(4)]
    req_id, spread, lull = 0, draw.choice((1, 1, 3)), draw.randrange(1, 5)
    while True:
        found = []
        for _ in range(
            draw.choice((0, 1, 2, 3, 90 if draw.randrange(40) == 0 else 0)) if draw.randrange(lull) == 0 else 0
        ):
            family = draw.choice(families) if draw.random() < of_family else []
            prompt = [*family, *(draw.randrange(9) for _ in range(draw.choice((1, 1, 1, 2, 30))))]
            found.append(
                Arrival(
                    req_id,
                    np.array(prompt, np.int32),
                    len(prompt),
                    draw.choice((1, 2, 9)),
                    priority=draw.randrange(spread),
                    background=draw.randrange(6) == 0,
                )
            )
            req_id += 1
        yield found


def violations(make: Factory, policy: str, seed: int, num_steps: int) -> tuple[list[str], int]:
    """Under random load, with aborts, retractions and failed forwards: requests that were overtaken by more than the
    bound allows, while they waited, and the most that were by those of their own kind and priority."""
    draw = random.Random(seed)
    config = ControlPlaneConfig(
        num_pages=draw.choice((30, 60, 200)),
        page_size=4,
        max_running_requests=draw.choice((1, 2, 4)),
        max_prefill_length=draw.choice((8, 64)),
        context_len=100,
        schedule_policy=policy,  # type: ignore[arg-type]
    )
    plane, told = make(config), arrivals_of(draw, 0.9 if policy == "lpm" else 0.3)
    came: dict[int, Arrival] = {}
    waits: set[int] = set()  # those that have not started yet
    overtakers: dict[int, dict[int, set[int]]] = {}  # of those that wait: by priority, the later ones that have started
    found, worst, in_flight = list[str](), 0, list[tuple[int, int]]()
    for step in range(num_steps):
        events: list[Event] = list(next(told)) if len(waits) < 300 else []
        for event in events:
            assert isinstance(event, Arrival)
            came[event.req_id] = event
            waits.add(event.req_id)
            overtakers[event.req_id] = {}
        if waits and draw.randrange(50) == 0:
            events.append(Abort(gone := draw.choice(sorted(waits))))
            waits.discard(gone)
        if in_flight and draw.randrange(300) == 0:
            events.insert(0, ForwardFailed(in_flight[0][0]))
            in_flight.clear()
        plan = plane.schedule(step, Events(events))
        entry = plane.buffers.ring[plan.ring_index]
        for req_id in entry.assigned_ids[: plan.num_assigned].tolist():
            waits.discard(req_id)
            overtakers.pop(req_id, None)
            one = came[req_id]
            for other in waits:
                if other < req_id and came[other].background == one.background:
                    p, q = came[other].priority, one.priority
                    started = overtakers[other].setdefault(q, set())
                    started.add(req_id)  # once, if it was retracted and starts again
                    worst = max(worst, len(started) if p == q else 0)
                    if len(started) > max(0, WINDOW[policy] - 1 + (p - q) * AGE):
                        found.append(f"request {other} of priority {p} was overtaken by {len(started)} of {q}")
        in_flight.append((step, plan.num_rows))
        while len(in_flight) > (1 if plan.num_rows else 0):
            done, rows = in_flight.pop(0)
            output = plane.commit(done, np.array([draw.randrange(9) for _ in range(rows)], np.int32))
            for req_id in output.req_ids[output.reasons != 0].tolist():
                waits.discard(req_id)
    return found, worst


def test_nobody_is_overtaken_more_often_than_the_bound(control_plane: Factory) -> None:
    worst = dict.fromkeys(WINDOW, 0)
    for seed in range(12):
        for policy in WINDOW:
            found, most = violations(control_plane, policy, seed, 400)
            assert found == [], f"{policy}, seed {seed}"
            worst[policy] = max(worst[policy], most)
    assert worst["lpm"] > AGE // 2 and worst["srpf"] > AGE, f"the runs are too easy: {worst}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nobody_is_for_long(times: int) -> None:
    for seed in range(1000, 1000 + 500 * times):
        for policy in WINDOW:
            found, _ = violations(lambda config: make_control_plane("rust_hotpath", config), policy, seed, 2000)
            assert found == [], f"{policy}, seed {seed}"


# ----------------------------------------------------------------------------------------------------------- its cost


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are looked up in the tree from now on."""
    found: list[int] = []
    original: Any = RadixTree.match

    def match(self: RadixTree, node: Any, text: list[int], *where: int) -> Any:
        found.append(len(text))
        return original(self, node, text, *where)

    monkeypatch.setattr(RadixTree, "match", match)
    return found


def test_a_step_in_which_nobody_starts_looks_up_one_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stands in the way of the next; all are looked up when they come, and every 16 steps."""
    driver = Driver(schedule_policy="lpm", num_pages=16, max_running_requests=4)
    driver.step(arrival(0, tokens(0, 40), max_tokens=20))
    driver.step(*(arrival(i, tokens(100 * i, 50), max_tokens=4) for i in range(1, 31)))
    looked_up = counted(monkeypatch)
    by_step = []
    for _ in range(15):
        before = len(looked_up)
        driver.step()
        by_step.append(len(looked_up) - before)
    assert driver.plane.stats().num_running == 1
    assert sorted(by_step)[:-1] == [1] * 14 and max(by_step) <= 1 + 30


def test_of_many_that_come_at_once_a_step_looks_up_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in 16 steps, if nobody starts; who starts is found once more, as the next is."""
    driver = Driver(schedule_policy="srpf", num_pages=16, max_running_requests=4)
    driver.step(arrival(0, tokens(0, 40), max_tokens=20))
    looked_up = counted(monkeypatch)
    by_step = []
    arrivals = [arrival(i, tokens(100 * i, 50), max_tokens=4) for i in range(1, 301)]
    for _ in range(8):
        before = len(looked_up)
        driver.step(*arrivals)
        arrivals = []
        by_step.append(len(looked_up) - before)
    assert driver.plane.stats().num_running == 1
    assert by_step == [65, 65, 65, 65, 300 - 4 * 64 + 1, 1, 1, 1]


def test_fcfs_looks_up_nobody_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(max_running_requests=1)
    driver.step(arrival(-1, [1], max_tokens=2))
    looked_up = counted(monkeypatch)
    driver.step(*(arrival(i, [1, 2, 3], max_tokens=1) for i in range(30)))
    assert len(looked_up) <= 3
