"""A cache that is emptied on demand, and one that is kept small."""

from __future__ import annotations

import pytest

from minisgl.step import Abort, ClearCache
from tests.helpers.scheduler import Driver, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

LONG = list(range(100, 114))  # 3 full pages and a half


def evictable(driver: Driver) -> int:
    found: int = driver.plane.stats().num_evictable_pages
    return found


def paths(driver: Driver) -> list[int]:
    """Lengths of the cached paths, in tokens."""
    return sorted(len(path) for path, _ in driver.plane.tree_pages())


# --------------------------------------------------------------------------------------------------------- ClearCache


def test_clear_cache_frees_every_unused_page() -> None:
    driver = Driver(num_pages=16)
    driver.step(arrival(1, LONG, max_tokens=1), arrival(2, [*LONG[:4], 9, 9, 9, 9, 9], max_tokens=9))
    assert evictable(driver) == 2
    driver.step(ClearCache())
    stats = driver.plane.stats()
    assert (stats.num_evictable_pages, stats.num_protected_pages, stats.num_free_pages) == (0, 2, 13)
    driver.step(arrival(3, LONG, max_tokens=1))
    assert driver.view.cached_len[3] == 4, "what the other holds"
    driver.run()
    assert driver.tokens[2] == list(range(1009, 1018))


def test_events_take_effect_in_order() -> None:
    driver = Driver()
    driver.step(arrival(1, LONG, max_tokens=9))
    driver.step(ClearCache(), Abort(1))
    assert evictable(driver) == 3
    driver.step(ClearCache(), ClearCache())
    assert evictable(driver) == 0


# --------------------------------------------------------------------------------------------------- cache_token_budget


@pytest.mark.parametrize(("budget", "kept"), [(0, 9), (1, 0), (8, 2), (11, 2), (1000, 9)])
def test_unused_pages_stay_within_the_cache_budget(budget: int, kept: int) -> None:
    driver = Driver(cache_token_budget=budget)
    for i in range(3):
        driver.step(arrival(i, [i] * 13, max_tokens=1))
    driver.step()
    assert evictable(driver) == kept
    assert driver.plan.num_evictable_pages == kept and driver.plan.num_free_pages == 64 - kept


def test_the_cache_budget_evicts_the_least_recently_used_pages() -> None:
    driver = Driver(cache_token_budget=24)
    for i in range(3):
        driver.step(arrival(i, [i] * 13, max_tokens=1))
    driver.step(arrival(10, [0] * 13, max_tokens=1))
    assert driver.view.cached_len[10] == 12, "it was there, and is the youngest now"
    driver.step()
    driver.step(arrival(11, [1] * 13, max_tokens=1))
    assert driver.view.cached_len[11] == 0
    driver.step(arrival(12, [0] * 13, max_tokens=1))
    assert driver.view.cached_len[12] == 12


def test_the_cache_budget_takes_nothing_from_running_requests() -> None:
    driver = Driver(cache_token_budget=1)
    driver.step(arrival(1, LONG, max_tokens=20), arrival(2, LONG, max_tokens=20))
    assert driver.plane.stats().num_protected_pages == 3
    driver.run()
    assert driver.tokens[1] == driver.tokens[2] == list(range(1014, 1034))
    driver.step()
    assert (evictable(driver), driver.plane.stats().num_free_pages) == (0, 64)


# ----------------------------------------------------------------------------------------------------- cache_max_prompt


def test_a_prompt_above_the_cache_limit_is_not_cached() -> None:
    driver = Driver(cache_max_prompt=13)
    driver.step(arrival(1, LONG[:13], max_tokens=8))
    driver.run()
    assert paths(driver) == [4, 8, 12, 16, 20]
    driver.step(arrival(2, [50, *LONG], max_tokens=9))
    driver.run()
    assert paths(driver) == [4, 8, 12, 16, 20], "of the longer one neither the prompt nor what it generated"
    assert driver.plane.stats().num_free_pages == 59


def test_the_smallest_cache_limit_is_one() -> None:
    driver = Driver(cache_max_prompt=1)
    driver.step(arrival(1, LONG[:5], max_tokens=8))
    driver.run()
    assert paths(driver) == []


def test_a_too_long_prompt_is_shared_while_its_request_runs() -> None:
    driver = Driver(cache_max_prompt=13)
    driver.step(arrival(1, LONG, max_tokens=3))
    driver.step(arrival(2, LONG[:9], max_tokens=9))
    assert driver.view.cached_len[2] == 8
    driver.run()
    assert paths(driver) == [4, 8, 12, 16]


def test_pages_that_a_too_long_prompt_had_matched_stay_cached() -> None:
    driver = Driver(cache_max_prompt=13)
    driver.step(arrival(1, LONG[:9], max_tokens=1))
    driver.step(arrival(2, [*LONG, 9, 9, 9, 9], max_tokens=5))
    assert driver.view.cached_len[2] == 8
    driver.run()
    assert paths(driver) == [4, 8]


def test_a_page_with_another_continuation_stays_cached() -> None:
    """What another made of a page of it cannot stay without the page."""
    driver = Driver(cache_max_prompt=13)
    driver.step(arrival(1, LONG, max_tokens=3), arrival(2, [*LONG[:8], 7, 7, 7, 7, 7], max_tokens=1))
    driver.run()
    assert paths(driver) == [4, 8, 12]


@pytest.mark.parametrize("is_started", [True, False])
def test_a_retracted_too_long_prompt_leaves_no_pages(is_started: bool) -> None:
    driver = Driver(cache_max_prompt=8, num_pages=10, context_len=64)
    driver.plane.reserve_ratio = 0
    driver.step(arrival(1, [1] * 8, max_tokens=17), arrival(2, LONG[:12], max_tokens=17))
    while not driver.plan.num_retracted:
        driver.step()
    if not is_started:
        driver.step(Abort(2))
        assert all(path[0] == 1 for path, _ in driver.plane.tree_pages())
        return
    driver.run()
    assert driver.tokens[2] == list(range(1012, 1029))
    assert all(path[0] == 1 for path, _ in driver.plane.tree_pages())


def test_a_pin_of_a_too_long_prompt_stays() -> None:
    driver = Driver(cache_max_prompt=8, max_pinned_pages=3, num_pages=128)
    driver.step(arrival(1, LONG, max_tokens=6, pin=True))
    driver.run()
    assert paths(driver) == [4, 8, 12]


def test_a_too_long_prompt_without_match_leaves_pages_of_others() -> None:
    driver = Driver(cache_max_prompt=8)
    driver.step(arrival(1, LONG[:8], max_tokens=1))
    assert lengths(driver.step(arrival(2, LONG, max_tokens=1, no_match=True))) == [(2, 14)]
    assert paths(driver) == [4, 8]
    assert driver.plane.stats().num_free_pages == 62
