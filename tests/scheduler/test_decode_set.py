"""One token a step: placeholders under overlap, how requests end, padding."""

from __future__ import annotations

import pytest

from minisgl.step import Abort, Finish, FinishReason
from tests.helpers.scheduler import Driver, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")


def test_a_token_that_is_not_committed_stands_as_a_placeholder() -> None:
    driver = Driver()
    driver.schedule(arrival(1, [5]), arrival(2, [6, 7]))
    assert [row.input_ids for row in driver.schedule()] == [[-1], [-2]]
    driver.commit()
    assert [row.input_ids for row in driver.schedule()] == [[-1], [-2]]
    driver.commit()
    driver.commit()
    assert [row.input_ids for row in driver.schedule()] == [[1003], [1004]], "known: no placeholder"


@pytest.mark.parametrize("overlap", [False, True])
def test_no_row_is_scheduled_past_the_limit(overlap: bool) -> None:
    driver = Driver()
    driver.schedule(arrival(1, [5] * 6, max_tokens=4))
    driver.run(overlap=overlap)
    assert driver.ends == {1: FinishReason.LENGTH}
    assert driver.tokens[1] == [1006, 1007, 1008, 1009]
    assert max(row.seq_len for rows in driver.rows for row in rows) == 9


def test_stop_ids_and_eos_end_a_request_and_stop_wins_over_length() -> None:
    driver = Driver(eos_ids=(1003,))
    driver.schedule(
        arrival(1, [5, 5], stop_ids=(1004,), max_tokens=9, ignore_eos=True),
        arrival(2, [5, 5], max_tokens=9),
        arrival(3, [5, 5], max_tokens=2),
        arrival(4, [5, 5], max_tokens=2, ignore_eos=True),
    )
    driver.run()
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert driver.ends == {1: stop, 2: stop, 3: stop, 4: length}
    assert {req_id: tokens[-1] for req_id, tokens in driver.tokens.items()} == {1: 1004, 2: 1003, 3: 1003, 4: 1003}


def test_min_tokens_keeps_stop_tokens_from_ending_but_not_the_limit() -> None:
    driver = Driver(sampler=lambda req_id, position: 7, eos_ids=(7,))
    driver.schedule(arrival(1, [5], min_tokens=3, max_tokens=9), arrival(2, [5], min_tokens=9, max_tokens=2))
    driver.run()
    assert driver.ends == {1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert (len(driver.tokens[1]), len(driver.tokens[2])) == (3, 2)


def test_generated_tokens_of_a_request_that_is_added_again_count() -> None:
    driver = Driver(sampler=lambda req_id, position: 7, eos_ids=(7,))
    driver.schedule(arrival(1, [5, 7, 7], num_generated=2, min_tokens=4, max_tokens=9))
    driver.schedule(arrival(2, [5, 7, 7], num_generated=2, max_tokens=3, ignore_eos=True))
    driver.commit()
    driver.run()
    assert driver.ends == {1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert (len(driver.tokens[1]), len(driver.tokens[2])) == (2, 1)


def test_an_end_found_while_a_later_step_is_in_flight_drops_its_token() -> None:
    driver = Driver(eos_ids=(1001,))
    driver.schedule(arrival(1, [5]))
    assert driver.schedule() != []
    assert driver.commit().reasons.tolist() == [FinishReason.STOP]
    assert driver.plane.stats().num_draining == 1
    assert len(driver.commit()) == 0
    assert driver.plane.stats().num_draining == 0


def test_no_overlap_rows_wait_for_their_token_and_the_others_do_not() -> None:
    driver = Driver()
    driver.schedule(arrival(1, [5], no_overlap=True), arrival(2, [6]))
    assert lengths(driver.schedule()) == [(2, 1)]
    driver.commit()
    rows = driver.schedule()
    assert lengths(rows) == [(1, 1), (2, 1)]
    assert [row.input_ids for row in rows] == [[1001], [-2]]


def test_a_row_that_is_not_eligible_leaves_its_token_to_the_budget() -> None:
    driver = Driver(max_prefill_length=4)
    driver.schedule(arrival(1, [5], max_tokens=1))
    rows = driver.schedule(arrival(2, [6] * 9))
    assert lengths(rows) == [(2, 4)], "nothing of the budget is kept for request 1, whose last token is in flight"


@pytest.mark.parametrize(("event", "reason"), [(Abort(1), FinishReason.ABORT), (Finish(1), FinishReason.STOP)])
@pytest.mark.parametrize("moment", ["same call", "waiting", "prefilling", "in flight", "decoding"])
def test_abort_and_finish_end_a_request_at_any_moment(event: Abort | Finish, reason: FinishReason, moment: str) -> None:
    driver = Driver(max_prefill_length=8)
    prompt = list(range(1, 20))
    if moment == "same call":
        driver.schedule(arrival(1, prompt), event)
    elif moment == "waiting":
        driver.step(arrival(2, [60] * 20), arrival(1, prompt))
        driver.schedule(event)
    else:
        driver.step(arrival(1, prompt))
        for _ in range({"prefilling": 0, "in flight": 2, "decoding": 3}[moment]):
            driver.step()
        if moment == "in flight":
            driver.schedule()
        driver.schedule(event)
        assert 1 not in [row.req_id for row in driver.rows[-1]]
    output = driver.commit()
    at = output.req_ids.tolist().index(1)
    assert (output.tokens[at], output.reasons[at], output.rows[at]) == (-1, reason, -1)
    driver.step(event)
    driver.run()
    assert driver.plane.stats().num_held_pages == driver.plane.stats().num_protected_pages == 0


def test_ends_without_a_token_come_before_the_rows() -> None:
    driver = Driver()
    driver.schedule(arrival(1, [5]), arrival(2, [6]))
    driver.schedule(Abort(2), arrival(3, [7] * 300))
    output = driver.commit()
    assert output.req_ids.tolist() == [2, 3, 1]
    assert output.rows.tolist() == [-1, -1, 0]
    assert output.step == 0


def test_an_event_for_an_unknown_or_ended_request_is_no_event() -> None:
    driver = Driver()
    driver.step(Abort(77), Finish(78))
    driver.step(arrival(1, [5], max_tokens=1))
    driver.step(Abort(1))
    assert driver.ends == {1: FinishReason.LENGTH}


def test_a_step_without_rows_is_a_plan_and_is_committed() -> None:
    driver = Driver(graph_sizes=(4,))
    assert driver.step() == []
    assert (driver.plan.num_rows, driver.plan.padded_rows, driver.plan.num_tokens) == (0, 0, 0)
    assert driver.plane.buffers.ring[0].qo_indptr[0] == 0


def test_slots_wait_for_the_last_step_that_holds_a_row_and_then_are_told_as_released() -> None:
    driver = Driver(max_running_requests=1)
    driver.schedule(arrival(1, [5]), arrival(2, [6]))
    driver.schedule(Abort(1))
    assert (driver.plan.num_freed, driver.plan.num_rows) == (0, 0), "step 0 still holds the slot"
    driver.commit()
    assert lengths(driver.schedule()) == [(2, 1)]
    assert (driver.plan.num_freed, driver.plan.num_assigned) == (1, 1)


def test_a_slot_whose_steps_are_all_committed_is_free_at_once() -> None:
    driver = Driver(max_running_requests=1)
    driver.step(arrival(1, [5]), arrival(2, [6]))
    assert lengths(driver.step(Abort(1))) == [(2, 1)]
    assert (driver.plan.num_freed, driver.plan.num_assigned) == (1, 1)


def test_freed_slots_are_bound_again_last_freed_first() -> None:
    driver = Driver()
    driver.step(*[arrival(i, [5 + i]) for i in range(3)])
    driver.step(Abort(0), Abort(2), arrival(7, [50]), arrival(8, [51]))
    assert driver.view.owner == {0: 8, 1: 1, 2: 7}


def test_a_decode_step_is_padded_to_the_next_graph_size_with_scratch_rows() -> None:
    driver = Driver(graph_sizes=(2, 4, 16), page_size=4)
    driver.step(*[arrival(i, [5 + i] * 5) for i in range(3)])
    assert driver.plan.padded_rows == 3, "prefills of several tokens are not padded"
    driver.step()
    plan, entry = driver.plan, driver.plane.buffers.ring[1]
    assert (plan.num_rows, plan.padded_rows, plan.num_tokens) == (3, 4, 3)
    scratch_slot, scratch_page = 8, 64
    assert (entry.req_slots[3], entry.seq_lens[3], entry.extend_lens[3]) == (scratch_slot, 1, 1)
    assert (entry.input_ids[3], entry.positions[3], entry.out_loc[3]) == (0, 0, scratch_page * 4)
    assert entry.last_page_len[3] == 1
    assert entry.qo_indptr[:5].tolist() == [0, 1, 2, 3, 4]
    assert entry.kv_indptr[:5].tolist() == [0, 2, 4, 6, 7]
    assert entry.sample_rows[: plan.num_samples].tolist() == [0, 1, 2]


def test_prefills_of_one_token_are_padded_too_and_too_many_rows_are_not() -> None:
    driver = Driver(graph_sizes=(2,))
    driver.step(arrival(1, [5]))
    assert driver.plan.padded_rows == 2
    driver.step(arrival(2, [6]), arrival(3, [7]))
    assert driver.plan.padded_rows == 3


def test_a_step_may_have_more_padded_rows_than_slots() -> None:
    driver = Driver(graph_sizes=(16,), max_running_requests=2)
    driver.step(arrival(1, [5]))
    entry = driver.plane.buffers.ring[0]
    assert driver.plan.padded_rows == 16
    assert entry.req_slots[:16].tolist() == [0] + [2] * 15


def test_page_table_changes_name_only_new_columns() -> None:
    driver = Driver()
    driver.step(arrival(1, [5] * 7))
    entries = [driver.plane.buffers.ring[i] for i in (0, 1)]
    assert entries[0].page_table_updates[0].tolist() == [0, 0, 2]
    driver.step()
    assert driver.plan.num_page_table_updates == 0, "token 8 has its place on page 1"
    driver.step()
    assert (driver.plan.num_page_table_updates, driver.plan.num_page_ids) == (1, 1)
    assert entries[0].page_table_updates[0].tolist() == [0, 2, 1]
    assert entries[0].page_ids[0] == driver.plane.page_table(1)[2]
