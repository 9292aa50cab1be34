"""Chunks of prompts: their sizes, what they share, and what a step has room for."""

from __future__ import annotations

import pytest

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.reference.admission import ChunkLimits, prefill_admission_plan, size_chunk
from minisgl.scheduler.reference.radix import RadixCache
from minisgl.scheduler.reference.request import make_request
from minisgl.step import Abort, EventError, FinishReason, StepBuffers, TokenBudget
from tests.helpers.scheduler import Driver, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

PROMPT = list(range(1, 31))  # 30 tokens: 7 pages of 4 and 2 tokens


def test_a_prompt_goes_in_by_chunks_that_end_on_page_borders_but_for_the_last() -> None:
    driver = Driver(max_prefill_length=15)
    seen = [driver.step(arrival(1, PROMPT))[0]] + [driver.step()[0] for _ in range(2)]
    assert [(row.extend_len, row.seq_len, row.samples) for row in seen] == [
        (12, 12, False),
        (12, 24, False),
        (6, 30, True),
    ]
    assert [token for row in seen for token in row.input_ids] == PROMPT
    assert driver.step()[0].input_ids == [1030], "then it decodes what it sampled"


def test_decode_rows_come_first_and_their_tokens_are_taken_from_the_budget() -> None:
    driver = Driver(max_prefill_length=9)
    driver.step(arrival(1, [1, 2]), arrival(2, [3, 4]))
    rows = driver.step(arrival(3, PROMPT))
    assert lengths(rows) == [(1, 1), (2, 1), (3, 4)]
    assert driver.plan.num_decode_rows == 2


def test_the_first_prefill_of_a_step_has_a_page_whatever_the_budget() -> None:
    driver = Driver(max_prefill_length=1)
    assert lengths(driver.step(arrival(1, [1, 2]), arrival(2, [3, 4]))) == [(1, 2)]
    assert lengths(driver.step()) == [(1, 1), (2, 2)]
    assert lengths(driver.step(arrival(3, PROMPT))) == [(1, 1), (2, 1), (3, 4)]


def test_a_budget_bounds_chunks_from_its_step_on_while_rows_decode_and_while_none_does() -> None:
    driver = Driver(max_prefill_length=13)
    assert lengths(driver.step(TokenBudget(6, 9), arrival(1, PROMPT))) == [(1, 8)]
    assert lengths(driver.step(TokenBudget(1, 10**12))) == [(1, 12)], "never more than max_prefill_length"
    assert lengths(driver.step(TokenBudget(9, 16), arrival(2, [50] * 20))) == [(1, 10)], "less than a page is left"
    assert lengths(driver.step()) == [(1, 1), (2, 8)], "a row that decodes takes its token of it"
    assert lengths(driver.step(TokenBudget(1, 99))) == [(1, 1), (2, 4)], "a page whatever it is"
    assert lengths(driver.step(TokenBudget(1, 1))) == [(1, 1), (2, 4)]
    driver.step(arrival(3, PROMPT[:9]), TokenBudget(1, 1))
    driver.run(overlap=True)
    assert {1, 2, 3} == driver.ends.keys()


def test_a_row_between_two_of_its_tokens_still_decodes_and_one_in_the_background_does_not_count() -> None:
    driver = Driver()
    driver.step(TokenBudget(4, 16), arrival(1, [5], no_overlap=True, max_tokens=9))
    driver.schedule()
    assert lengths(driver.schedule(arrival(2, PROMPT))) == [(2, 4)], "request 1 waits for its token in flight"
    other = Driver()
    other.step(TokenBudget(4, 16), arrival(1, [5], background=True, max_tokens=9))
    assert lengths(other.step(arrival(2, PROMPT)))[-1] == (2, 16)


@pytest.mark.parametrize("field", ["beside_decode", "prefill_only"])
def test_a_budget_of_nothing_is_refused(field: str) -> None:
    driver = Driver()
    with pytest.raises(EventError, match=f"event 1: {field}: must be at least 1"):
        driver.schedule(arrival(1, [5]), TokenBudget(**{"beside_decode": 5, "prefill_only": 5, field: 0}))
    assert lengths(driver.step(arrival(1, PROMPT))) == [(1, 30)], "nothing was changed"


def test_prefills_and_admissions_stop_at_the_first_that_gets_nothing() -> None:
    driver = Driver(max_prefill_length=9)
    assert lengths(driver.step(arrival(1, PROMPT), arrival(2, [50] * 6), arrival(3, [60]))) == [(1, 8)]
    assert lengths(driver.step()) == [(1, 8)], "a started prefill goes first; what waits finds less than a page"


def test_a_small_prompt_may_use_the_rest_of_the_budget_below_a_page() -> None:
    driver = Driver(max_prefill_length=9)
    assert lengths(driver.step(arrival(1, PROMPT), arrival(2, [60]))) == [(1, 8), (2, 1)]


def test_a_prefill_that_gets_nothing_keeps_new_requests_out_but_not_decode_rows() -> None:
    driver = Driver(num_pages=6, max_prefill_length=5)
    driver.step(arrival(1, [1] * 7, max_tokens=10))
    driver.step()
    driver.plane.reserve_ratio = 0
    assert lengths(driver.step(arrival(2, PROMPT[:16]))) == [(1, 1), (2, 4)]
    assert lengths(driver.step()) == [(1, 1), (2, 4)], "request 1 takes one of the pages that request 2 counted on"
    assert lengths(driver.step()) == [(1, 1), (2, 4)]
    assert lengths(driver.step(arrival(3, [60]))) == [(1, 1)], "request 2 stands last: it waits, and so does 3"
    assert (driver.plan.num_retracted, driver.plane.stats().num_waiting) == (0, 1)


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    driver = Driver()
    driver.step(arrival(1, PROMPT))
    row = driver.step(arrival(2, [*PROMPT[:20], 99, 98]))[1]
    assert (row.extend_len, row.seq_len, row.input_ids) == (2, 22, [99, 98])
    assert driver.view.cached_len[2] == 20
    assert driver.plane.page_table(2)[:5] == driver.plane.page_table(1)[:5]
    stats = driver.plane.stats()
    assert (stats.num_prompt_tokens_total, stats.num_cached_tokens_total) == (52, 20)


def test_a_prompt_is_shared_within_the_step_that_computes_it() -> None:
    driver = Driver()
    rows = driver.schedule(arrival(1, PROMPT), arrival(2, PROMPT), arrival(3, PROMPT[:9]))
    assert lengths(rows) == [(1, 30), (2, 2), (3, 1)]
    assert driver.plane.page_table(2)[:7] == driver.plane.page_table(1)[:7]


def test_a_chunk_first_extends_the_match_by_what_others_computed_meanwhile() -> None:
    driver = Driver(max_prefill_length=5)
    driver.step(arrival(1, [1, 2, 3, 4], max_tokens=13))
    for _ in range(10):
        driver.step()
    follow_up = [1, 2, 3, 4, *range(1004, 1017), *[50] * 8]
    assert lengths(driver.step(arrival(2, follow_up))) == [(1, 1), (2, 4)]
    assert lengths(driver.step()) == [(1, 1), (2, 4)]
    assert driver.ends == {1: FinishReason.LENGTH}, "so its tokens up to 16 are in the cache"
    row = driver.step()[0]
    assert (row.extend_len, row.seq_len) == (4, 20), "from 12 on, page 3 is matched and page 4 computed"
    entry = driver.plane.buffers.ring[driver.plan.ring_index]
    assert entry.page_table_updates[: driver.plan.num_page_table_updates].tolist() == [[row.slot, 3, 2]]


def test_a_full_hit_computes_its_last_whole_page_again_on_a_page_of_its_own() -> None:
    driver = Driver()
    driver.step(arrival(1, PROMPT[:8]))
    row = driver.step(arrival(2, PROMPT[:8]))[1]
    assert (row.extend_len, row.seq_len) == (4, 8)
    first, second = driver.plane.page_table(1), driver.plane.page_table(2)
    assert second[0] == first[0]
    assert second[1] not in first
    assert driver.plane.stats().num_held_pages == 2, "request 1's first generated token, request 2's last page"


def test_a_full_hit_with_pages_of_one_token_computes_one_token() -> None:
    driver = Driver(page_size=1)
    driver.step(arrival(1, PROMPT))
    assert lengths(driver.step(arrival(2, PROMPT)))[1] == (2, 1)


def test_a_partial_page_is_not_shared() -> None:
    driver = Driver()
    driver.step(arrival(1, PROMPT[:6]))
    assert lengths(driver.step(arrival(2, PROMPT[:7])))[1] == (2, 3)


def test_what_an_aborted_prefill_computed_stays_in_the_cache() -> None:
    driver = Driver(max_prefill_length=16)
    driver.step(arrival(1, PROMPT))
    driver.step(Abort(1), arrival(2, PROMPT))
    assert driver.view.cached_len[2] == 16


def test_generated_tokens_are_cached_at_the_end() -> None:
    driver = Driver()
    driver.step(arrival(1, PROMPT[:6], max_tokens=7))
    driver.run()
    sequence = PROMPT[:6] + driver.tokens[1]
    assert len(sequence) == 13
    driver.step(arrival(2, [*sequence, 5]))
    assert driver.view.cached_len[2] == 12, "the last sampled token has no KV, so only whole pages of the first 12"


def test_no_match_computes_the_whole_prompt_and_caches_it_only_at_its_end() -> None:
    driver = Driver()
    driver.step(arrival(1, PROMPT))
    assert lengths(driver.step(arrival(2, PROMPT, no_match=True)))[1] == (2, 30)
    other = [77] * 8
    driver.step(arrival(3, other, no_match=True))
    driver.step(arrival(4, other))
    assert driver.view.cached_len[4] == 0
    driver.run()
    driver.step(arrival(5, other))
    assert driver.view.cached_len[5] == 4


def test_the_naive_cache_keeps_nothing() -> None:
    driver = Driver(cache="naive")
    driver.step(arrival(1, PROMPT))
    driver.step(arrival(2, PROMPT))
    driver.run()
    driver.step(arrival(3, PROMPT))
    assert driver.view.cached_len == {1: 0, 2: 0, 3: 0}
    assert driver.plane.tree_pages() == []
    driver.run()
    assert driver.plane.stats().num_free_pages == 64


def test_a_chunk_shrinks_to_the_pages_that_are_there() -> None:
    driver = Driver(num_pages=8)
    driver.step(arrival(1, [5] * 9, max_tokens=3))  # 3 pages
    driver.plane.reserve_ratio = 0
    assert lengths(driver.step(arrival(2, PROMPT[:20]))) == [(1, 1), (2, 20)]
    driver = Driver(num_pages=8)
    driver.step(arrival(1, [5] * 9, max_tokens=3))
    driver.step(arrival(2, PROMPT[:24]))
    assert driver.plane.stats().num_waiting == 1, "it doesn't fit beside request 1, says the estimate"
    driver.run()
    assert len(driver.tokens[2]) == 4


def test_page_table_entries_beyond_the_capacity_of_a_step_wait() -> None:
    # 3 requests of up to 7 pages share a prompt: entries add up to more than max(7, 8) though pages don't.
    driver = Driver(num_pages=8, max_running_requests=3, context_len=28)
    prompt = PROMPT[:18]
    assert driver.config.limits().max_page_changes - 3 == 8
    driver.plane.reserve_ratio = 0
    rows = driver.step(arrival(1, prompt, max_tokens=2), arrival(2, prompt, max_tokens=2))
    assert lengths(rows) == [(1, 18)], "5 + 5 entries are more than 8"
    assert lengths(driver.step()) == [(1, 1), (2, 2)]


def test_buffers_may_be_given() -> None:
    config = ControlPlaneConfig(64, 4, 8, 64, 256)
    buffers = StepBuffers(config.limits(), ring_len=3)
    driver = Driver(buffers=buffers)
    driver.step(arrival(1, PROMPT))
    driver.run()
    assert driver.plane.buffers is buffers
    assert [plan.ring_index for plan in driver.plans] == [0, 1, 2, 0]


def test_prefill_rows_stand_in_request_order_whoever_was_sized_first() -> None:
    driver = Driver(max_prefill_length=16)
    driver.step(arrival(1, PROMPT))
    assert lengths(driver.step(arrival(2, [60], priority=-1))) == [(2, 1), (1, 14)]


def test_pages_that_a_chunk_matches_do_not_count_as_room_for_it() -> None:
    tree = RadixCache(4, 2, "lru")
    pages = tree.take(3)
    handle, _ = tree.insert(tree.root, [1, 2, 3, 4], pages[:2], 0)
    tree.release(handle)
    request = make_request(arrival(1, [1, 2, 3, 4, 5, 6, 7, 8]), 0, 100, (), True)
    chunk = size_chunk(request, tree, ChunkLimits(100, 100), prefill_admission_plan)
    assert (chunk.match.pages, chunk.num_tokens, chunk.num_new_pages) == ([0, 1], 2, 1)
