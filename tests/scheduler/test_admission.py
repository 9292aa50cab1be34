"""Who starts when: order, slots, the estimate, refusals."""

from __future__ import annotations

import pytest

from minisgl.scheduler.reference.admission import RATIO_MAX, RATIO_MIN, ReserveRatio
from minisgl.step import FinishReason
from tests.helpers.scheduler import Driver, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")


def test_requests_start_by_priority_then_arrival() -> None:
    driver = Driver(max_running_requests=2)
    driver.schedule(
        arrival(9, [1]), arrival(8, [2], priority=1), arrival(7, [3], priority=-1), arrival(6, [4], priority=-1)
    )
    assert lengths(driver.rows[0]) == [(7, 1), (6, 1)]
    driver.commit()
    assert lengths(driver.schedule(arrival(5, [5], priority=-2)))[0] == (7, 1), "the started keep their slots"
    driver.commit()
    driver.run()
    firsts = [req_id for rows in driver.rows for req_id, _ in lengths(rows)]
    assert sorted(set(firsts), key=firsts.index) == [7, 6, 5, 9, 8]


def test_rows_stand_in_request_order_whenever_they_were_admitted() -> None:
    driver = Driver()
    driver.step(arrival(1, [1]), arrival(2, [2]))
    driver.step(arrival(3, [3], priority=-1))
    assert [row.req_id for row in driver.step()] == [3, 1, 2]


def test_slots_are_given_lowest_first_and_bound_once() -> None:
    driver = Driver()
    driver.step(arrival(5, [1]), arrival(6, [2]))
    assert driver.view.owner == {0: 5, 1: 6}
    assert driver.plan.num_assigned == 2
    driver.step()
    assert driver.plan.num_assigned == 0


def test_a_prompt_that_can_never_fit_is_refused_with_the_next_commit() -> None:
    driver = Driver(context_len=16)
    assert driver.schedule(arrival(1, [1] * 16), arrival(2, [1] * 15, max_tokens=5)) != []
    output = driver.commit()
    assert (output.req_ids[0], output.tokens[0], output.rows[0], output.reasons[0]) == (1, -1, -1, FinishReason.ERROR)
    assert (output.req_ids[1], output.reasons[1]) == (2, FinishReason.LENGTH), "the other has room for one token"


def test_the_pool_limits_the_length_as_the_context_does() -> None:
    driver = Driver(num_pages=3, context_len=100)
    driver.step(arrival(1, [1] * 13), arrival(2, [2] * 12, max_tokens=50), arrival(3, [3] * 5, max_tokens=50))
    driver.run()
    assert driver.ends == {1: FinishReason.ERROR, 2: FinishReason.LENGTH, 3: FinishReason.LENGTH}
    assert (len(driver.tokens[2]), len(driver.tokens[3])) == (1, 8), "12 places for KV make 13 tokens"


def test_the_estimate_counts_prompts_and_a_share_of_the_outputs() -> None:
    # 16 pages of 4. Request 1 holds 2 pages, may make 16 tokens more: 15 * 716 >> 10 = 10 tokens, 3 pages.
    # Request 2 needs 4 pages for its prompt, and a share of its output.
    def admitted(max_tokens: int, ratio: int | None = None) -> bool:
        driver = Driver(num_pages=16)
        driver.step(arrival(1, [1] * 8, max_tokens=16))
        if ratio is not None:
            driver.plane.reserve_ratio = ratio
        driver.schedule(arrival(2, [2] * 16, max_tokens=max_tokens))
        return driver.plan.num_assigned == 1

    # 16 - 3 pages are left after the row's new page, 3 of them reserved: 13 - 3 - 4 = 6 pages, 24 tokens of output
    ratio = 715
    assert admitted((24 * 1024 + 1023) // ratio)
    assert not admitted((24 * 1024 + 1023) // ratio + 1)
    assert not admitted((24 * 1024 + 1023) // ratio, ratio=1024)
    assert admitted(200, ratio=102)


def test_matched_pages_need_no_room_but_do_not_count_as_room_either() -> None:
    driver = Driver(num_pages=8)
    prompt = list(range(1, 18))  # 5 pages, of which 4 stay cached
    driver.step(arrival(1, prompt, max_tokens=1))
    driver.step(arrival(2, [50] * 5, max_tokens=2))  # holds 2 pages; 2 free, 4 evictable
    assert driver.plane.stats().num_evictable_pages == 4
    driver.plane.reserve_ratio = 0
    driver.schedule(arrival(3, [*prompt[:16], 40, 41, 42, 43, 44, 45, 46, 47, 48], max_tokens=1))
    assert driver.plan.num_assigned == 0, "25 tokens: 4 matched and 3 more, where 2 are free"
    driver.commit()


def test_with_nothing_started_the_first_in_line_starts_whatever_the_estimate() -> None:
    driver = Driver(num_pages=8)
    driver.plane.reserve_ratio = RATIO_MAX
    assert lengths(driver.step(arrival(1, [1] * 20, max_tokens=30))) == [(1, 20)]


@pytest.mark.reference_only
def test_a_failed_admission_leaves_no_trace() -> None:
    driver = Driver(num_pages=8, max_running_requests=2)
    prompt = list(range(1, 14))
    driver.step(arrival(1, prompt, max_tokens=1))  # leaves 3 pages in the cache
    driver.step(arrival(2, [50] * 5, max_tokens=40))
    tree = driver.plane.state.tree
    before = (tree.num_nodes, tree.clock, sorted(driver.plane.tree_pages()), [node.stamp for node in tree.nodes()])
    driver.step(arrival(3, [*prompt[:8], *[60] * 12], max_tokens=40))
    assert driver.plane.stats().num_waiting == 1
    assert before == (tree.num_nodes, tree.clock, sorted(driver.plane.tree_pages()), [n.stamp for n in tree.nodes()])


def test_the_ratio_jumps_after_a_retraction_and_falls_otherwise_within_its_bounds() -> None:
    ratio = ReserveRatio()
    assert ratio.value == 716
    ratio.after_step(0)
    assert ratio.value == 715
    ratio.after_step(3)
    assert ratio.value == 971
    ratio.after_step(1)
    assert ratio.value == RATIO_MAX == 1024
    for _ in range(2000):
        ratio.after_step(0)
    assert ratio.value == RATIO_MIN == 102


@pytest.mark.reference_only
def test_a_long_output_counts_as_4096_tokens_at_most() -> None:
    driver = Driver(page_size=16, num_pages=1024, context_len=100_000)
    driver.step(arrival(1, [1] * 8, max_tokens=90_000))
    request = next(iter(driver.plane.state.started))
    driver.plane.reserve_ratio = 1024
    assert driver.plane.state.ratio.reserve_pages(request, 16) == 4096 // 16


def test_the_estimate_counts_what_a_started_prompt_has_yet_to_take() -> None:
    driver = Driver(num_pages=8, max_prefill_length=9)
    driver.plane.reserve_ratio = 0
    assert lengths(driver.step(arrival(1, [1] * 30, max_tokens=1), arrival(2, [60]))) == [(1, 8)]


def test_the_estimate_counts_those_admitted_in_the_same_step() -> None:
    driver = Driver(num_pages=16)
    driver.plane.reserve_ratio = RATIO_MAX
    rows = driver.step(*[arrival(i, [50 + i] * 4, max_tokens=24) for i in range(3)])
    assert lengths(rows) == [(0, 4), (1, 4)], "14 pages are left, 6 each for the outputs of two, and 7 for the third"
