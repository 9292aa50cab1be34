"""Pages that the engine loads instead of computing them: where they stand, what they cost, when they are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.scheduler.inputs import check_events
from minisgl.step import FROM_STORE, Abort, ClearCache, EventError, Events, PagesRead, StepPlan, TokenBudget
from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")

LONG = list(range(1, 62))  # 15 pages of 4 tokens and a token


def loads(one: Driver, plan: StepPlan | None = None) -> list[tuple[int, int, int]]:
    """(slot, first column, count)"""
    plan = one.plan if plan is None else plan
    entry = one.plane.buffers.ring[plan.ring_index]
    return [tuple(row) for row in entry.page_loads[: plan.num_page_loads].tolist()]


def test_stored_pages_are_loaded_and_the_rest_is_computed() -> None:
    one = Driver()
    rows = one.step(arrival(1, LONG, stored_to=10))
    assert loads(one) == [(0, 0, 10)]
    assert [(row.extend_len, row.seq_len, row.samples) for row in rows] == [(21, 61, True)]
    assert one.view.cached_len[1] == 40, "for the client it is cached"
    assert one.plane.stats().num_loaded_pages_total == 10
    one.run()
    one.step(arrival(2, LONG))
    assert loads(one) == [] and one.view.cached_len[2] == 60, "what was loaded is in the tree"


def test_a_token_is_left_to_compute_and_the_tree_comes_first() -> None:
    one = Driver()
    assert one.step(arrival(1, LONG[:40], stored_to=10))[0].extend_len == 4, "its last page"
    assert loads(one) == [(0, 0, 9)]
    one.run()
    one.step(arrival(2, LONG, stored_to=13))
    assert loads(one) == [(one.plane.buffers.ring[one.plan.ring_index].assigned[0, 0], 10, 3)]


def test_requests_of_one_step_share_what_one_of_them_loads() -> None:
    one = Driver()
    one.step(arrival(1, LONG, stored_to=10), arrival(2, LONG, stored_to=10))
    assert loads(one) == [(0, 0, 10)] and one.view.cached_len[2] == 60


def test_what_begins_behind_the_tree_s_end_is_loaded_once_the_row_is_there() -> None:
    one = Driver(max_prefill_length=8)
    one.step(arrival(1, LONG, stored_from=2, stored_to=14))
    assert loads(one) == []
    one.step()
    assert loads(one) == [(0, 2, 12)], "behind the two pages that the first step computes"


def test_loads_cost_of_the_budget_and_come_in_parts() -> None:
    text = list(range(1, 1202))
    one = Driver(num_pages=400, context_len=1300, max_prefill_length=4)
    first = one.step(arrival(1, text, stored_to=300))
    assert loads(one) == [(0, 0, 256)] and first[0].extend_len == 4, "a page is computed, and more is loaded"
    one.step()
    assert loads(one) == [(0, 257, 43)]
    one = Driver(num_pages=400, context_len=1300, max_prefill_length=12)
    rows = one.step(arrival(1, text[:1026], stored_to=256), arrival(2, [7] * 20))
    assert [row.extend_len for row in rows] == [2, 4], "2 tokens and 1024 / 256 of a budget of 12 leave a page"


def test_a_step_loads_a_long_text_while_little_may_be_computed() -> None:
    """32 tokens: a step before anything is known of the machine (`runner/step_time.py`), the first after a restart."""
    text = list(range(1, 4097))
    one = Driver(num_pages=1100, context_len=5000)
    rows = one.step(TokenBudget(32, 32), arrival(1, text, stored_to=1020))
    assert loads(one) == [(0, 0, 1020)]
    assert [(row.extend_len, row.samples) for row in rows] == [(16, True)], "its first token comes out of it"


@pytest.mark.parametrize("options", [{"no_match": True}, {"namespace": 1}])
def test_a_request_without_prefix_sharing_loads_only_its_own_pages(options: dict[str, Any]) -> None:
    one = Driver()
    one.step(arrival(1, LONG, stored_to=10, **options))
    assert bool(loads(one)) == ("namespace" in options)


def test_a_naive_cache_loads_nothing() -> None:
    for options in ({}, {"checkpoint_interval": 16, "num_checkpoints": 4}):
        one = Driver(cache="naive", **options)
        one.step(arrival(1, LONG, stored_to=10))
        assert loads(one) == [] and one.view.cached_len[1] == 0


@pytest.mark.parametrize(
    ("stored", "field"), [((-1, 3), "stored_from"), ((0, -1), "stored_to"), ((0, 62), "stored_to")]
)
def test_invalid_stored_pages_of_an_arrival_are_refused(stored: tuple[int, int], field: str) -> None:
    one = Driver()
    wrong = arrival(1, LONG, stored_from=stored[0], stored_to=stored[1])
    with pytest.raises(EventError, match=field):
        one.plane.schedule(0, Events([wrong]))
    with pytest.raises(EventError, match=field):
        check_events(Events([wrong]), {}, None, {}, one.config)


def test_a_small_budget_bounds_what_a_step_loads() -> None:
    one = Driver(num_pages=400, context_len=1300)
    one.step(arrival(1, [5] * 6, max_tokens=30), TokenBudget(4, 8))
    one.step()
    one.step(arrival(2, list(range(1, 1202)), stored_to=300))
    assert 0 < loads(one)[0][2] <= 4 * 256 // 4


def sent_back() -> Driver:
    """Three requests, of which the last has generated five tokens and waits; the others fill the pool."""
    one = Driver(num_pages=6, context_len=64)
    one.plane.reserve_ratio = 0
    one.step(*[arrival(number, [10 + number] * 4, max_tokens=12) for number in range(3)])
    while not one.plan.num_retracted:
        one.step()
    one.step()  # takes what it left in the tree
    assert one.plane.stats().num_waiting == 1
    return one


def test_stored_pages_of_a_retracted_request_are_loaded_once_read() -> None:
    one, other = sent_back(), sent_back()
    for driver, events in ((one, [PagesRead(2, 0, 2)]), (other, [])):
        driver.step(*events)
        driver.step(Abort(0), Abort(1))
        while driver.plane.stats().num_waiting:
            driver.step()
        driver.run()
    assert one.tokens[2] == other.tokens[2] and len(one.tokens[2]) == 12
    assert one.plane.stats().num_loaded_pages_total == 2 and other.plane.stats().num_loaded_pages_total == 0


def test_pages_read_for_a_request_that_does_not_wait_are_not_loaded() -> None:
    """The engine of a request that has a slot has nothing at hand."""
    one = Driver(max_prefill_length=8)
    one.step(arrival(1, LONG))
    one.step(PagesRead(1, 2, 14), PagesRead(9, 0, 2))
    one.run()
    assert one.plane.stats().num_loaded_pages_total == 0


@pytest.mark.parametrize(("read", "field"), [((-1, 3), "stored_from"), ((0, -1), "stored_to")])
def test_invalid_pages_read_events_are_refused(read: tuple[int, int], field: str) -> None:
    one = sent_back()
    with pytest.raises(EventError) as refused:
        one.step(PagesRead(2, *read))
    assert (refused.value.index, refused.value.field) == (0, field)
    one.run()


def with_states(**options: Any) -> Driver:
    """Pages of 4 tokens, and states at the borders alone that a prompt needs."""
    return Driver(**{"num_pages": 100, "checkpoint_interval": 400, "num_checkpoints": 8} | options)


def states(one: Driver) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(slot, from) of those that begin, and (row, tokens into it) of those that are saved."""
    plan = one.plan
    entry = one.plane.buffers.ring[plan.ring_index]
    begins = [tuple(row) for row in entry.state_begins[: plan.num_state_begins].tolist()]
    return begins, [tuple(row[:2]) for row in entry.state_saves[: plan.num_state_saves].tolist()]


def saved(one: Driver) -> list[int]:
    return sorted(len(path) // 4 for path, _ in one.plane.tree_states())


def test_a_text_begins_with_the_state_that_is_at_hand_and_keeps_it_for_the_next() -> None:
    one = with_states()
    rows = one.step(arrival(1, LONG, stored_to=10))
    assert (loads(one), states(one)) == ([(0, 0, 10)], ([(0, FROM_STORE)], [(0, 0), (0, 20)]))
    assert [(row.extend_len, row.seq_len) for row in rows] == [(21, 61)] and one.view.cached_len[1] == 40
    one.run()
    assert saved(one) == [10, 15]
    one.step(arrival(2, [*LONG[:40], 9, 9, 9, 9, 9]))
    assert loads(one) == [] and one.view.cached_len[2] == 40, "without the disk"


def test_without_a_slot_for_it_the_state_is_begun_with_all_the_same() -> None:
    one = with_states(num_checkpoints=0)
    one.step(arrival(1, LONG, stored_to=10))
    assert (loads(one), states(one)) == ([(0, 0, 10)], ([(0, FROM_STORE)], []))
    one.run()
    assert one.plane.stats().num_evictable_pages == 0, "nobody finds what has no checkpoint"


def test_a_deeper_checkpoint_of_the_tree_wins_and_a_deeper_state_at_hand_does() -> None:
    one = with_states()
    one.step(arrival(1, LONG[:41]))
    one.run()
    assert saved(one) == [10]
    for number, end, count in ((2, 10, 0), (3, 6, 0), (4, 13, 3)):
        one.step(arrival(number, [*LONG[:56], number], stored_to=end))
        assert sum(load[2] for load in loads(one)) == count
        assert (FROM_STORE in {begin for _, begin in states(one)[0]}) == (count > 0)
        one.step(Abort(number))
        one.run()
        one.step(ClearCache())
        one.step(arrival(10 + number, LONG[:41]))
        one.run()


def test_pages_that_the_tree_has_without_a_checkpoint_are_not_loaded_again() -> None:
    one = with_states(max_prefill_length=100)
    one.step(arrival(1, LONG), arrival(2, [*LONG[:48], *[7] * 9], stored_to=13))
    assert loads(one) == [(1, 12, 1)] and one.view.cached_len[2] == 52, "behind those of the first, of this very step"
    assert states(one)[0] == [(0, -1), (1, FROM_STORE)]


def test_a_state_between_pages_that_the_tree_has_is_begun_with_and_the_rest_is_covered() -> None:
    one = with_states(max_prefill_length=100)
    rows = one.step(arrival(1, LONG), arrival(2, LONG, stored_to=8))
    assert loads(one) == [] and one.view.cached_len[2] == 32 and states(one)[0] == [(0, -1), (1, FROM_STORE)]
    assert (rows[1].extend_len, len(rows[1].out_loc)) == (29, 1), "into nothing, where the tree has the page"
    one.run()
    assert saved(one) == [8, 15]


def test_pages_before_a_state_come_at_once_whatever_the_budget() -> None:
    text = list(range(1, 6402))
    one = with_states(num_pages=1700, context_len=7000, max_prefill_length=16, checkpoint_interval=6400)
    rows = one.step(arrival(1, text, stored_to=1600), arrival(2, [7] * 20))
    assert loads(one) == [(0, 0, 1600)] and [row.extend_len for row in rows] == [1], "they cost 25 of 16"


def test_the_state_behind_more_than_the_last_token_is_none() -> None:
    one = with_states()
    one.step(arrival(1, LONG[:40], stored_to=10))
    assert loads(one) == [] and states(one)[0] == [(0, -1)], "one token is computed, and before it there is no state"


def test_pages_that_begin_behind_the_tree_s_end_have_no_state_to_begin_with() -> None:
    one = with_states()
    one.step(arrival(1, LONG, stored_from=2, stored_to=10))
    assert loads(one) == [] and states(one)[0] == [(0, -1)]


def test_a_retracted_request_begins_with_the_state_read_for_it() -> None:
    one = Driver(num_pages=6, context_len=64, checkpoint_interval=8, num_checkpoints=0)
    one.plane.reserve_ratio = 0
    one.step(*[arrival(number, [10 + number] * 4, max_tokens=12) for number in range(3)])
    while not one.plan.num_retracted:
        one.step()
    one.step()
    one.step(PagesRead(2, 0, 1))
    one.step(Abort(0), Abort(1))
    while one.plane.stats().num_waiting:
        one.step()
    assert one.plane.stats().num_loaded_pages_total == 1 and states(one)[0][0][1] == FROM_STORE
    one.run()
    assert len(one.tokens[2]) == 12


def test_what_is_cached_is_known_up_to_the_last_checkpoint() -> None:
    one = with_states()
    one.step(arrival(1, LONG[:41]))
    one.run()
    one.step(arrival(2, LONG, max_tokens=20))
    known = np.array(LONG, np.int32)
    assert one.plane.cached_pages(known, 0) == 15, "the step that saves it is under way"
    assert one.plane.cached_pages(known[:56], 0) == 10, "of the pages behind it, which are there, no state is"
    one.run()
