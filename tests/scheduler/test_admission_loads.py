"""Pages that the engine loads instead of computing them: where they stand, what they cost, when they are computed."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.scheduler.inputs import check_events
from minisgl.step import Abort, EventError, Events, PagesRead, StepPlan, TokenBudget
from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")

LONG = list(range(1, 62))  # 15 pages of 4 tokens and a token


def loads(one: Driver, plan: StepPlan | None = None) -> list[tuple[int, int, int]]:
    """(slot, first column, count)"""
    plan = one.plan if plan is None else plan
    entry = one.plane.buffers.ring[plan.ring_index]
    return [tuple(row) for row in entry.page_loads[: plan.num_page_loads].tolist()]


def test_what_is_stored_is_loaded_and_the_rest_computed() -> None:
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
    text = list(range(1, 802))
    one = Driver(num_pages=300, context_len=1000, max_prefill_length=16)
    first = one.step(arrival(1, text, stored_to=200))
    assert loads(one) == [(0, 0, 128)] and first[0].extend_len == 4, "a page is computed, and more is loaded"
    one.step()
    assert loads(one) == [(0, 129, 71)]
    one = Driver(num_pages=300, context_len=1000, max_prefill_length=16)
    rows = one.step(arrival(1, text[:258], stored_to=64), arrival(2, [7] * 20))
    assert [row.extend_len for row in rows] == [2, 4], "2 tokens and 256 / 32 of a budget of 16 leave a page"


@pytest.mark.parametrize("options", [{"no_match": True}, {"namespace": 1}])
def test_who_shares_nothing_loads_only_its_own(options: dict[str, Any]) -> None:
    one = Driver()
    one.step(arrival(1, LONG, stored_to=10, **options))
    assert bool(loads(one)) == ("namespace" in options)


def test_a_naive_cache_and_a_model_with_states_load_nothing() -> None:
    for options in ({"cache": "naive"}, {"checkpoint_interval": 16, "num_checkpoints": 4}):
        one = Driver(**options)
        one.step(arrival(1, LONG, stored_to=10))
        assert loads(one) == [] and one.view.cached_len[1] == 0


@pytest.mark.parametrize(
    ("stored", "field"), [((-1, 3), "stored_from"), ((0, -1), "stored_to"), ((0, 62), "stored_to")]
)
def test_what_cannot_be_is_refused(stored: tuple[int, int], field: str) -> None:
    one = Driver()
    wrong = arrival(1, LONG, stored_from=stored[0], stored_to=stored[1])
    with pytest.raises(EventError, match=field):
        one.plane.schedule(0, Events([wrong]))
    with pytest.raises(EventError, match=field):
        check_events(Events([wrong]), {}, None, {}, one.config)


def test_a_small_budget_bounds_what_a_step_loads() -> None:
    one = Driver()
    one.step(arrival(1, [5] * 6, max_tokens=30), TokenBudget(4, 8))
    one.step()
    one.step(arrival(2, LONG, stored_to=15))
    assert loads(one)[0][2] <= 4 * 32 // 4


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


def test_pages_of_who_was_sent_back_are_loaded_when_they_were_read() -> None:
    one, other = sent_back(), sent_back()
    for driver, events in ((one, [PagesRead(2, 0, 2)]), (other, [])):
        driver.step(*events)
        driver.step(Abort(0), Abort(1))
        while driver.plane.stats().num_waiting:
            driver.step()
        driver.run()
    assert one.tokens[2] == other.tokens[2] and len(one.tokens[2]) == 12
    assert one.plane.stats().num_loaded_pages_total == 2 and other.plane.stats().num_loaded_pages_total == 0


def test_what_was_read_for_who_does_not_wait_is_not_loaded() -> None:
    """The engine of a request that has a slot has nothing at hand."""
    one = Driver(max_prefill_length=8)
    one.step(arrival(1, LONG))
    one.step(PagesRead(1, 2, 14), PagesRead(9, 0, 2))
    one.run()
    assert one.plane.stats().num_loaded_pages_total == 0


@pytest.mark.parametrize(("read", "field"), [((-1, 3), "stored_from"), ((0, -1), "stored_to")])
def test_what_cannot_have_been_read_is_refused(read: tuple[int, int], field: str) -> None:
    one = sent_back()
    with pytest.raises(EventError) as refused:
        one.step(PagesRead(2, *read))
    assert (refused.value.index, refused.value.field) == (0, field)
    one.run()
