"""Pins: the prompt pages that stay in the cache after the end of a request."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.step import Abort, Arrival, ClearCache, EventError, Events, Finish, FinishReason, ForwardFailed, Unpin
from tests.helpers.scheduler import Driver, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

PROMPT = list(range(1, 15))  # 3 full pages and a half


def pinning(req_id: int = 1, tokens: list[int] = PROMPT, max_tokens: int = 1, **options: object) -> Arrival:
    return arrival(req_id, tokens, max_tokens, pin=True, **options)


def driver(**options: Any) -> Driver:
    """16 pages, of which a request needs 10 at most."""
    return Driver(**({"num_pages": 16, "context_len": 41, "max_pinned_pages": 6} | options))


def cached(driver: Driver, tokens: list[int]) -> int:
    """Pages of `tokens` in the tree."""
    paths = {path for path, _ in driver.plane.tree_pages()}
    return sum(tuple(tokens[: 4 * count]) in paths for count in range(1, len(tokens) // 4 + 1))


def fill(driver: Driver) -> None:
    """A request that takes every page that it can get."""
    req_id = 1000 + driver.next_step
    driver.step(arrival(req_id, [90] * 39, max_tokens=1))
    driver.step(arrival(req_id + 500, [91] * 39, max_tokens=1))
    driver.run()
    assert driver.ends[req_id] is driver.ends[req_id + 500] is FinishReason.LENGTH


def test_full_pages_of_the_prompt_stay_until_they_are_unpinned() -> None:
    one = driver()
    one.step(pinning(max_tokens=9))
    one.run()
    assert one.plane.stats().num_pinned_pages == 3
    fill(one)
    assert cached(one, PROMPT) == 3
    one.step(ClearCache())
    assert (cached(one, PROMPT), one.plane.stats().num_evictable_pages) == (3, 0)
    one.step(arrival(2, [*PROMPT, 50], max_tokens=1))
    assert one.view.cached_len[2] == 12
    one.step(Unpin(1))
    assert one.plane.stats().num_pinned_pages == 0
    fill(one)
    assert cached(one, PROMPT) == 0


@pytest.mark.parametrize("event", [Abort(1), Unpin(1)])
def test_an_abort_or_an_unpin_of_a_live_request_takes_its_pin_away(event: Abort | Unpin) -> None:
    one = driver()
    one.step(pinning(max_tokens=9))
    assert one.plane.stats().num_pinned_pages == 3, "from its prefill on"
    one.step(event)
    assert one.plane.stats().num_pinned_pages == 0
    one.run()
    fill(one)
    assert cached(one, PROMPT) == 0
    one.step(pinning(7, max_tokens=1), pinning(8, [70] * 12))
    assert one.plane.stats().num_pinned_pages == 6, "there is room again"


def test_a_finish_is_an_end_by_itself() -> None:
    one = driver()
    one.step(pinning(max_tokens=9))
    one.step(Finish(1))
    assert (one.ends, one.plane.stats().num_pinned_pages) == ({1: FinishReason.STOP}, 3)


def test_a_request_that_ends_before_its_prompt_is_scheduled_pins_nothing() -> None:
    one = driver(max_prefill_length=8)
    assert lengths(one.step(pinning())) == [(1, 8)]
    one.step(Finish(1))
    assert one.ends == {1: FinishReason.STOP}
    one.step(pinning(2, [60] * 24))
    assert one.plane.stats().num_pinned_pages == 0, "all six pages are promised to the other"


def test_a_prompt_that_is_cached_altogether_is_pinned_too() -> None:
    """Its last page is computed again, and is not the one in the tree."""
    one = driver()
    one.step(arrival(1, PROMPT[:12], max_tokens=1))
    one.step(pinning(2, PROMPT[:12]))
    assert one.view.cached_len[2] == 8
    assert one.plane.stats().num_pinned_pages == 3
    fill(one)
    assert cached(one, PROMPT) == 3


def test_a_short_prompt_pins_nothing_and_its_name_is_taken_until_it_is_unpinned() -> None:
    one = driver()
    one.step(pinning(1, [1, 2, 3]))
    assert one.plane.stats().num_pinned_pages == 0
    with pytest.raises(EventError) as caught:
        one.schedule(arrival(1, [1]))
    assert (caught.value.field, caught.value.reason) == ("req_id", "1 is in use")
    one.step(Unpin(1))
    assert lengths(one.schedule(arrival(1, [1]))) == [(1, 1)]


def test_a_retraction_before_the_last_token_takes_no_pin_away() -> None:
    one = driver()
    one.schedule(arrival(9, [90] * 38, max_tokens=2, ignore_eos=True))
    one.schedule(pinning(background=True))
    assert one.plane.stats().num_running == 2
    one.commit()
    one.schedule(arrival(8, [80] * 12, max_tokens=20, priority=-1))
    assert one.plan.num_retracted == 1, "it makes room for another while its only token is in flight"
    one.commit()
    assert one.ends[1] is FinishReason.LENGTH
    assert (cached(one, PROMPT), one.plane.stats().num_pinned_pages) == (3, 3)
    one.run()


def test_shared_pages_are_there_once_and_stay_for_the_last() -> None:
    one = driver()
    one.step(pinning(1), pinning(2, PROMPT[:12]))
    assert one.plane.stats().num_pinned_pages == 3
    one.step(Unpin(1))
    assert one.plane.stats().num_pinned_pages == 3
    one.step(Unpin(1), Unpin(3))
    fill(one)
    assert cached(one, PROMPT) == 3
    one.step(Unpin(2))
    assert one.plane.stats().num_pinned_pages == 0


def test_a_failed_forward_empties_the_tree_and_those_that_live_on_pin_again() -> None:
    one = driver(max_running_requests=1)
    one.step(pinning(1))
    one.schedule(arrival(2, [2] * 5))
    one.uncommitted.clear()
    assert one.plane.stats().num_pinned_pages == 3
    one.schedule(ForwardFailed(1), pinning(3, [3] * 9, max_tokens=2))
    assert one.plane.stats().num_pinned_pages == 2, "what was pinned is gone"
    one.uncommitted.clear()
    one.schedule(pinning(4, [4] * 13, priority=-1))
    one.uncommitted.clear()
    assert lengths(one.schedule(ForwardFailed(2), arrival(5, [5], priority=-2))) == [(5, 1)]
    assert one.plane.stats().num_pinned_pages == 0
    one.commit()
    one.run()
    assert one.plane.stats().num_pinned_pages == 3, "of the one that had no row in the step that failed"


def test_a_request_whose_forward_failed_has_no_pin() -> None:
    one = driver()
    one.schedule(pinning(1))
    one.uncommitted.clear()
    one.schedule(ForwardFailed(0), pinning(2, [60] * 24))
    one.commit()
    assert one.ends == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert one.plane.stats().num_pinned_pages == 6


def test_after_a_failed_forward_pages_and_names_are_free_in_the_same_call() -> None:
    """Whoever asked for the pins asks again."""
    one = driver(max_running_requests=1)
    one.step(pinning(1, [60] * 24))
    one.schedule(arrival(2, [2] * 5))
    one.uncommitted.clear()
    assert lengths(one.schedule(ForwardFailed(1), arrival(1, [1]))) == [(1, 1)]
    one = driver()
    one.step(pinning(1))
    one.schedule(pinning(2))
    one.uncommitted.clear()
    one.schedule(ForwardFailed(1), pinning(3), pinning(4))
    one.commit()
    assert one.plane.stats().num_pinned_pages == 3
    assert refused(one, pinning(5, [5] * 4))[0] == 0


def refused(one: Driver, *events: Any) -> tuple[int, str]:
    before = one.plane.stats()
    with pytest.raises(EventError) as caught:
        one.plane.schedule(one.next_step, Events(list(events)))
    assert caught.value.field == "pin"
    assert one.plane.stats() == before
    return caught.value.index, caught.value.reason


def test_a_pin_beyond_the_limit_is_refused() -> None:
    one = driver()
    one.step(pinning(1))
    assert refused(one, arrival(2, [1]), pinning(3, [3] * 16)) == (1, "4 pages beside 3 exceed max_pinned_pages 6")
    assert refused(one, pinning(2), pinning(3)) == (1, "3 pages beside 6 exceed max_pinned_pages 6")
    assert refused(one, Unpin(9), Abort(1), pinning(3, [3] * 16))[0] == 2, "it has ended: nothing is given back"
    one.step(Unpin(1), pinning(2), pinning(3))
    assert refused(one, pinning(4, [4] * 4)) == (0, "1 pages beside 6 exceed max_pinned_pages 6")
    one.step(pinning(5, [5] * 3))


def test_pages_unpinned_by_an_abort_can_be_pinned_in_the_same_call() -> None:
    one = driver()
    one.step(pinning(1, max_tokens=20))
    one.step(pinning(2), Abort(2), Abort(1), pinning(3, [3] * 24), Unpin(3), pinning(4, [4] * 24))
    assert one.plane.stats().num_pinned_pages == 6


def test_a_pin_without_cache_is_refused() -> None:
    assert refused(driver(), pinning(no_match=True)) == (0, "must not come with no_match")
    assert refused(driver(cache="naive"), pinning()) == (0, "the cache is naive and keeps nothing")


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_longest_request_runs_beside_all_that_may_be_pinned(page_size: int) -> None:
    one = Driver(num_pages=64 // page_size, page_size=page_size, context_len=41, max_pinned_pages=24 // page_size)
    assert one.config.max_pinned_pages == one.config.num_pinnable_pages
    for req_id in range(6):
        one.step(pinning(req_id, [20 + req_id] * 4))
    assert one.plane.stats().num_pinned_pages == 24 // page_size
    one.step(arrival(50, [9, 8], max_tokens=1000), arrival(51, [9, 7], max_tokens=1000))
    one.run()
    assert len(one.tokens[50]) == len(one.tokens[51]) == 39


def test_pages_that_entered_and_left_and_hits_are_counted() -> None:
    one = driver()
    one.step(arrival(1, PROMPT, max_tokens=1))
    stats = one.plane.stats()
    assert (stats.num_inserted_pages_total, stats.num_evicted_pages_total) == (3, 0)
    assert (stats.num_hits_total, stats.num_misses_total) == (0, 1)
    one.step(arrival(2, PROMPT, max_tokens=1), arrival(3, [9], max_tokens=1))
    one.step(ClearCache())
    stats = one.plane.stats()
    assert (stats.num_inserted_pages_total, stats.num_evicted_pages_total) == (3, 3)
    assert (stats.num_hits_total, stats.num_misses_total) == (1, 2)
    fill(one)
    stats = one.plane.stats()
    entered = stats.num_inserted_pages_total - stats.num_evicted_pages_total
    assert entered == stats.num_evictable_pages + stats.num_protected_pages > 0
