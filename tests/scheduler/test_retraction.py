"""Too few pages: eviction, then retraction of the last in order."""

from __future__ import annotations

import pytest

from minisgl.step import Abort, FinishReason
from tests.helpers.scheduler import Driver, arrival, crowded, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")


def test_the_last_in_order_is_retracted_and_comes_back_with_what_it_generated() -> None:
    driver = crowded()
    assert lengths(driver.step()) == [(0, 1), (1, 1)]
    assert driver.plan.num_retracted == 1
    assert driver.plane.stats().num_waiting == 1
    driver.run()
    assert {req_id: len(tokens) for req_id, tokens in driver.tokens.items()} == {0: 12, 1: 12, 2: 12}
    assert driver.tokens[2] == list(range(1004, 1016)), "no token lost, none repeated"
    assert set(driver.ends.values()) == {FinishReason.LENGTH}
    assert driver.plane.stats().num_prompt_tokens_total == 12, "of first admissions only"


def test_priority_decides_who_is_last() -> None:
    driver = Driver(num_pages=4, context_len=64)
    driver.plane.reserve_ratio = 0
    driver.step(arrival(1, [1] * 4, max_tokens=12), arrival(2, [2] * 4, max_tokens=12, priority=-1))
    for _ in range(4):
        driver.step()
    assert lengths(driver.step()) == [(2, 1)]


def test_what_was_retracted_is_still_cached_if_it_was_not_evicted() -> None:
    driver = crowded()
    driver.step()  # retracts 2, and takes its second page first, then its first
    driver.step(Abort(0), Abort(1))
    stats = driver.plane.stats()
    assert stats.num_cached_tokens_total == 0, "of first admissions only"
    assert driver.view.cached_len[2] in (0, 4)
    driver.run()
    assert len(driver.tokens[2]) == 12


def test_eviction_comes_before_retraction() -> None:
    driver = Driver(num_pages=4, context_len=64)
    driver.step(arrival(1, [1] * 8, max_tokens=1))
    assert driver.plane.stats().num_evictable_pages == 2
    driver.plane.reserve_ratio = 0
    driver.step(arrival(2, [2] * 8, max_tokens=9))
    driver.run()
    assert sum(plan.num_retracted for plan in driver.plans) == 0
    assert driver.ends[2] is FinishReason.LENGTH


def test_a_step_with_a_retraction_admits_no_request() -> None:
    driver = Driver(num_pages=8)
    driver.plane.reserve_ratio = 0
    driver.step(arrival(1, [1] * 8, max_tokens=8), arrival(2, [2] * 24, max_tokens=8))
    driver.plane.reserve_ratio = 0
    assert lengths(driver.step(arrival(9, [99], max_tokens=1, priority=-5))) == [(1, 1)]
    assert (driver.plan.num_retracted, driver.plan.num_assigned) == (1, 0)
    assert driver.plan.num_evictable_pages == 5, "there would be room"
    assert (9, 1) in lengths(driver.step())


def test_a_decode_row_waits_when_it_would_be_its_own_victim() -> None:
    driver = Driver(num_pages=4, context_len=64)
    driver.plane.reserve_ratio = 0
    # request 1 holds 3 pages and needs none for a while, request 2 holds one and needs its second
    driver.step(arrival(1, [1] * 9, max_tokens=4), arrival(2, [2] * 4, max_tokens=2))
    assert lengths(driver.step()) == [(1, 1)]
    assert (driver.plan.num_retracted, driver.plane.stats().num_running) == (0, 2)
    driver.run()
    assert driver.tokens[2] == [1004, 1005]


def test_a_request_retracted_in_flight_keeps_its_token_and_its_slot_until_the_commit() -> None:
    driver = crowded()
    driver.schedule()  # retracts 2, nothing in flight: its slot is free at once
    assert driver.plan.num_freed == 1
    driver = crowded(3, 3)
    assert len(driver.schedule()) == 3
    assert lengths(driver.schedule()) == [(0, 1), (1, 1)], "retracts 2, which has a row in the step before"
    assert (driver.plan.num_freed, driver.plane.stats().num_draining) == (0, 1)
    assert 2 in driver.commit().req_ids.tolist()
    assert driver.plane.stats().num_draining == 0
    driver.schedule()
    assert driver.plan.num_freed == 1
    driver.commit()
    driver.run()
    assert driver.tokens[2] == list(range(1004, 1016))


def test_a_token_in_flight_may_end_a_request_that_was_retracted_meanwhile() -> None:
    driver = crowded(3, 3, eos_ids=(2008,), sampler=lambda r, p: p + (2000 if r == 2 else 1000))
    driver.schedule()
    driver.schedule()
    assert driver.plan.num_retracted == 1
    driver.commit()
    assert driver.ends == {2: FinishReason.STOP}
    assert driver.plane.stats().num_waiting == 0


def test_a_started_prefill_retracts_too_when_there_is_no_page() -> None:
    driver = Driver(num_pages=6, max_prefill_length=5, context_len=64)
    driver.step(arrival(1, [1] * 4, max_tokens=20))
    driver.plane.reserve_ratio = 0
    prompt = list(range(50, 66))
    assert lengths(driver.step(arrival(2, prompt, priority=-1))) == [(1, 1), (2, 4)]
    for _ in range(6):
        driver.step()
    assert len(driver.tokens[2]) >= 3, "request 2 stands first: it had its 4 pages and more, whatever request 1 needed"
    driver.run()
    assert len(driver.tokens[1]) == 20


def test_a_prefill_can_be_retracted_and_its_chunks_stay_cached() -> None:
    driver = Driver(num_pages=6, max_prefill_length=5)
    driver.step(arrival(1, [1] * 7, max_tokens=9))
    driver.step()
    driver.plane.reserve_ratio = 0
    driver.step(arrival(2, list(range(50, 66))))
    for _ in range(3):
        driver.step()
    assert driver.plane.stats().num_free_pages == 0, "request 2 has 3 pages and waits for its last"
    for _ in range(5):
        if driver.plan.num_retracted == 0:
            driver.step()
    assert driver.plan.num_retracted == 1
    assert driver.plane.stats().num_evictable_pages == 2, "one of its pages was taken"
    driver.run()
    assert driver.view.cached_len[2] == 8
    assert len(driver.tokens[2]) == 4


@pytest.mark.parametrize("page_size", [1, 4])
def test_one_request_can_fill_the_whole_pool(page_size: int) -> None:
    driver = Driver(num_pages=8, page_size=page_size, context_len=1000)
    driver.step(arrival(1, [1, 2, 3], max_tokens=1000))
    driver.run()
    assert 3 + len(driver.tokens[1]) == 8 * page_size + 1
    assert sum(plan.num_retracted for plan in driver.plans) == 0


def test_pages_of_an_end_are_freed_in_page_table_order() -> None:
    driver = Driver(num_pages=8, cache="naive")
    driver.step(arrival(1, [1] * 9, max_tokens=1))
    assert driver.plane.free_pages() == [7, 6, 5, 4, 3, 0, 1, 2]


def test_duplicates_in_a_tail_are_freed_with_its_partial_page() -> None:
    driver = Driver(num_pages=8)
    # Both generate the same tokens after the same prompt of one page; the first to end puts them into the tree.
    driver.step(arrival(1, [1] * 5, max_tokens=5), arrival(2, [1] * 5, max_tokens=7))
    driver.run()
    pages = driver.plane.tree_pages()
    assert sorted(len(path) for path, _ in pages) == [4, 8]
    assert driver.plane.free_pages() == [7, 6, 5, 3, 2, 4], "3 of request 1; 2, which the tree had, and 4"
