"""Seeded random events against the scheduler alone, which checks itself after every call."""

from __future__ import annotations

import random

import pytest

from minisgl.scheduler.reference.admission import RATIO_MIN, RATIO_START
from minisgl.step import Abort, Arrival, Event, Finish, FinishReason, ForwardFailed
from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")


def _random_arrival(rng: random.Random, req_id: int, max_len: int) -> Arrival:
    length = rng.randint(1, max_len + 2) if rng.random() < 0.5 else rng.randint(1, 12)
    return arrival(
        req_id,
        [1] * length if rng.random() < 0.5 else [rng.randrange(2) for _ in range(length)],
        max_tokens=rng.choice([1, 3, 12, 40]),
        priority=rng.choice([0, 0, 0, -1, 1]),
        no_overlap=rng.random() < 0.1,
        no_match=rng.random() < 0.1,
        min_tokens=rng.randint(0, 3),
        stop_ids=(0,) if rng.random() < 0.3 else (),
    )


def _random_driver(rng: random.Random, page_size: int) -> Driver:
    num_pages = rng.randint(8, 40) if page_size < 16 else rng.randint(2, 8)
    driver = Driver(
        sampler=lambda req_id, position: hash((req_id, position)) % 3,
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=rng.randint(1, 6),
        max_prefill_length=rng.choice([1, 7, 32, 256]),
        context_len=rng.choice([40, 100]),
        eos_ids=rng.choice([(2,), ()]),
        cache=rng.choice(["lru", "lru", "lfu", "naive"]),
        graph_sizes=rng.choice([(), (1, 2, 4, 8)]),
    )
    driver.plane.reserve_ratio = rng.choice([RATIO_MIN, RATIO_START])  # the lower, the more is misjudged
    return driver


def _play(rng: random.Random, driver: Driver, overlap: bool, num_steps: int) -> list[int]:
    """Random events for `num_steps`; the ids of the requests that were sent."""
    ids: list[int] = []
    for _ in range(num_steps):
        events: list[Event] = []
        if len(driver.uncommitted) > 1:
            if rng.random() < 0.15:
                events.append(ForwardFailed(driver.uncommitted[0]))
                driver.uncommitted.clear()
            else:
                driver.commit()
        elif driver.uncommitted and rng.random() < 0.1:
            events.append(ForwardFailed(driver.uncommitted.pop()))
        for _ in range(rng.choice([0, 0, 1, 3])):
            ids.append(len(ids))
            events.append(_random_arrival(rng, ids[-1], driver.config.limits().max_seq_len))
        if ids and rng.random() < 0.2:
            events.append(rng.choice([Abort, Finish])(rng.choice(ids)))
        driver.schedule(*events)
        if not overlap or (not driver.rows[-1] and rng.random() < 0.5):
            while driver.uncommitted:
                driver.commit()
    return ids


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_events_keep_every_invariant_and_leak_nothing(page_size: int, overlap: bool) -> None:
    seen: set[FinishReason] = set()
    num_retracted = num_cached = 0
    for seed in range(12):
        rng = random.Random(seed)
        driver = _random_driver(rng, page_size)
        ids = _play(rng, driver, overlap, num_steps=60)
        driver.run(overlap=overlap)
        assert sorted(driver.ends) == ids, "every request ends once"
        stats = driver.plane.stats()
        assert stats.num_held_pages == stats.num_protected_pages == stats.num_draining == 0
        assert stats.num_free_pages + stats.num_evictable_pages == driver.config.num_pages
        seen |= set(driver.ends.values())
        num_retracted += stats.num_retracted_total
        num_cached += stats.num_cached_tokens_total
    assert seen == set(FinishReason) - {FinishReason.NONE}
    assert num_retracted
    assert num_cached
