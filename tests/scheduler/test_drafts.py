"""Several tokens of a row in one step: which rows, whose tokens count, what becomes of the others' pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minisgl.step import Abort, Draft, EventError, FinishReason, ForwardFailed
from tests.helpers.scheduler import Driver, Sampler, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

PROMPT = [0, 1, 2] * 4


def repeats(req_id: int, position: int) -> int:
    return position % 3


def until(position: int) -> Sampler:
    """It repeats up to there, and then says 9."""
    return lambda req_id, at: at % 3 if at < position else 9


def driver(sampler: Sampler = repeats, **config: object) -> Driver:
    return Driver(sampler, **{"max_draft_len": 4, **config})


def test_a_text_that_repeats_takes_fewer_steps_and_is_the_same() -> None:
    plain, drafting = driver(max_draft_len=0), driver()
    for one in (plain, drafting):
        one.step(arrival(1, PROMPT, max_tokens=30))
        one.run()
    assert drafting.tokens == plain.tokens and drafting.ends == plain.ends == {1: FinishReason.LENGTH}
    assert len(plain.rows) == 30 and len(drafting.rows) == 8
    assert [len(rows) for rows in drafting.rows] == [1, 3, 5, 5, 5, 5, 5, 1]
    stats = drafting.plane.stats()
    assert stats.num_drafted_total == stats.num_accepted_total == 22
    assert plain.plane.stats().num_drafted_total == 0


def test_each_drafted_token_has_a_decode_row_of_its_own_behind_all_others() -> None:
    one = driver(max_prefill_length=40)
    one.step(arrival(1, PROMPT, max_tokens=30), arrival(2, [50, 51], max_tokens=30))
    rows = one.schedule(arrival(3, [60] * 5))
    assert [(row.req_id, row.seq_len, row.input_ids) for row in rows[:4]] == [
        (1, 13, [0]),
        (2, 3, [2]),
        (1, 14, [1]),
        (1, 15, [2]),
    ]
    assert lengths(rows[4:]) == [(3, 5)]
    assert one.plan.num_decode_rows == 4
    output = one.commit()
    assert output.req_ids.tolist() == [1, 2, 1, 1, 3]
    assert output.rows.tolist() == [0, 1, 2, 3, 4]


def test_tokens_count_up_to_the_first_wrong_guess_and_pages_are_given_back() -> None:
    one = driver(until(16), page_size=1)
    one.step(arrival(1, PROMPT, max_tokens=30))
    one.step()
    assert one.tokens[1] == [0, 1, 2, 0]
    before = one.plane.stats()
    assert len(one.step()) == 5, "the row and four tokens"
    assert one.tokens[1] == [0, 1, 2, 0, 9]
    after = one.plane.stats()
    assert after.num_free_pages == before.num_free_pages - 1
    assert (after.num_drafted_total, after.num_accepted_total) == (6, 2)
    rows = one.step()
    assert [(row.seq_len, row.input_ids) for row in rows] == [(17, [9])], "nothing is known to follow 9"
    one.run()
    stats = one.plane.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == 64


def test_rejected_drafts_are_followed_by_a_pause() -> None:

    def misleads(req_id: int, position: int) -> int:
        """Five known tokens, then one that they were not followed by."""
        return position % 6 if position % 6 < 5 else 100 + position

    one = driver(misleads, num_pages=400, context_len=1000)
    one.step(arrival(1, [0, 1, 2, 3, 4, 7, 0, 1, 2, 3, 4, 8], max_tokens=400))
    one.run()
    stats = one.plane.stats()
    assert stats.num_accepted_total == 0
    assert 0 < stats.num_drafted_total < 20, "of 400 tokens"


def test_a_row_waits_for_its_draft_and_the_others_do_not() -> None:
    one = driver()
    one.schedule(arrival(1, PROMPT, max_tokens=30), arrival(2, [50, 51], max_tokens=30))
    assert lengths(one.schedule()) == [(1, 1), (2, 1)], "nothing is known before the first commit"
    one.commit()
    assert lengths(one.schedule()) == [(2, 1)], "what may follow is known, but not the token before it"
    one.commit()
    assert [row.req_id for row in one.schedule()] == [1, 2, 1, 1]
    one.commit()
    assert lengths(one.schedule()) == [(2, 1)], "its draft is in flight"
    one.commit()
    one.run(overlap=True)
    assert one.tokens[1] == [position % 3 for position in range(12, 42)]


def test_a_text_that_does_not_repeat_keeps_its_overlap() -> None:
    one = driver(sampler=lambda req_id, position: 1000 + position)
    one.schedule(arrival(1, [5, 6, 7], max_tokens=9))
    for _ in range(8):
        assert [row.input_ids for row in one.schedule()] == [[-1]]
        one.commit()


@pytest.mark.parametrize("overlap", [False, True])
def test_no_row_is_past_the_limit_and_a_stop_in_a_draft_ends(overlap: bool) -> None:
    one = driver(eos_ids=(7,), sampler=lambda req_id, position: 7 if req_id == 3 and position == 20 else position % 3)
    stop = (2,)
    one.schedule(
        arrival(1, PROMPT, max_tokens=7),
        arrival(2, PROMPT, max_tokens=30, stop_ids=stop, min_tokens=7),
        arrival(3, PROMPT, 30),
    )
    one.run(overlap=overlap)
    assert one.ends == {1: FinishReason.LENGTH, 2: FinishReason.STOP, 3: FinishReason.STOP}
    assert one.tokens[1] == [0, 1, 2, 0, 1, 2, 0]
    assert one.tokens[2] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert one.tokens[3] == [0, 1, 2, 0, 1, 2, 0, 1, 7]
    assert max(row.seq_len for rows in one.rows for row in rows if row.req_id == 1) == 18


@pytest.mark.parametrize("options", [{"no_drafts": True}, {"background": True}])
def test_requests_that_may_not_have_drafts_have_none(options: dict[str, object]) -> None:
    one = driver()
    one.step(arrival(1, PROMPT, max_tokens=30, **options))
    one.run()
    assert {len(rows) for rows in one.rows} == {1}
    assert one.plane.stats().num_drafted_total == 0


def test_drafts_get_the_rows_that_are_left() -> None:
    one = driver(max_running_requests=4)
    one.step(*(arrival(i, PROMPT, max_tokens=30) for i in range(3)))
    rows = one.step()
    assert [row.req_id for row in rows] == [0, 1, 2, 0], "four rows at most, in request order"
    one.run()
    assert all(one.tokens[i] == [position % 3 for position in range(12, 42)] for i in range(3))


def test_drafts_get_the_tokens_that_are_left() -> None:
    one = driver(max_prefill_length=9, page_size=4)
    one.step(arrival(1, PROMPT, max_tokens=30))
    one.step()
    rows = one.step(arrival(2, [60] * 7, max_tokens=2))
    assert lengths(rows) == [(1, 1), (1, 1), (2, 7)], "one of nine is left"


def test_drafts_get_the_pages_that_are_left_and_retract_no_request() -> None:
    one = driver(page_size=1, num_pages=18, cache="naive")
    one.plane.reserve_ratio = 102
    one.step(arrival(1, PROMPT, max_tokens=7), arrival(2, [50, 51], max_tokens=3))
    rows = one.step()
    assert [row.req_id for row in rows] == [1, 2, 1, 1]
    assert one.plane.stats().num_free_pages == 0 and one.plane.stats().num_retracted_total == 0
    one.run()
    assert one.tokens[1] == [0, 1, 2, 0, 1, 2, 0]


def test_requests_in_the_background_give_way_to_drafts_and_have_no_rows_beside_them() -> None:
    one = driver(page_size=1, num_pages=18, cache="naive")
    one.plane.reserve_ratio = 102
    one.step(arrival(1, PROMPT, max_tokens=7), arrival(2, [50, 51, 52], max_tokens=5, background=True))
    one.step()
    assert one.plane.stats().num_retracted_total == 0
    assert [row.req_id for row in one.rows[-1]] == [1, 1, 1], "the draft's step"
    one.step()
    assert one.plane.stats().num_retracted_total == 1, "pages lack for the second draft"
    one.run()
    assert one.tokens[1] == [0, 1, 2, 0, 1, 2, 0] and len(one.tokens[2]) == 5


def test_the_cache_knows_how_the_same_prompt_went_on() -> None:
    """The text itself has no token twice."""
    one = driver(sampler=lambda req_id, position: 1000 + position)
    one.step(arrival(1, list(range(100, 110)), max_tokens=30))
    one.run()
    steps = len(one.rows)
    one.step(arrival(2, list(range(100, 110)), max_tokens=30))
    one.run()
    assert one.tokens[2] == one.tokens[1]
    assert one.plane.stats().num_drafted_total == one.plane.stats().num_accepted_total > 15
    assert len(one.rows) - steps < 15


def test_what_the_cache_does_not_hold_to_the_token_is_no_guess() -> None:
    one = driver(sampler=lambda req_id, position: 1000 + position if req_id == 1 else 2000 + position)
    one.step(arrival(1, list(range(100, 112)), max_tokens=30))
    one.run()
    one.step(arrival(2, list(range(100, 112)), max_tokens=30))
    one.run()
    assert one.tokens[2] == list(range(2012, 2042))
    assert one.plane.stats().num_accepted_total == 0


Disturb = Callable[[Driver], None]


def abort(one: Driver) -> None:
    one.schedule(Abort(1))
    assert len(one.commit()) == 1, "its tokens are nobody's"


def fail(one: Driver) -> None:
    one.uncommitted.clear()
    one.schedule(ForwardFailed(one.next_step - 1))
    one.commit()


@pytest.mark.parametrize("disturb", [abort, fail])
def test_a_draft_in_flight_is_dropped_with_its_request(disturb: Disturb) -> None:
    one = driver(page_size=1)
    one.step(arrival(1, PROMPT, max_tokens=30))
    assert len(one.schedule()) == 3
    disturb(one)
    one.run()
    assert one.ends[1] in (FinishReason.ABORT, FinishReason.ERROR)
    stats = one.plane.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == 64
    assert stats.num_accepted_total == 0


def test_a_draft_of_a_request_that_is_retracted_meanwhile_still_counts() -> None:
    """Request 2's draft holds the last pages when request 1 needs one."""
    one = driver(
        page_size=1,
        num_pages=18,
        cache="naive",
        sampler=lambda req_id, position: position % 3 if req_id == 2 else 1000 + position,
    )
    one.plane.reserve_ratio = 102
    one.step(arrival(1, [50, 51], max_tokens=9), arrival(2, PROMPT, max_tokens=7))
    assert [row.req_id for row in one.schedule()] == [1, 2, 2, 2]
    assert [row.req_id for row in one.schedule()] == [1]
    assert one.plan.num_retracted == 1
    assert one.commit().req_ids.tolist() == [1, 2, 2, 2]
    one.commit()
    one.run()
    assert one.tokens[2] == [0, 1, 2, 0, 1, 2, 0]


# ------------------------------------------------------------------------------------------------ drafts from outside


def plainly(req_id: int, position: int) -> int:
    """A text that says nothing twice."""
    return 1000 + position


def right(length: int, count: int = 4) -> tuple[int, ...]:
    """What follows the first `length` tokens of such a text."""
    return tuple(1000 + position for position in range(length, length + count))


def test_drafts_are_wanted_and_taken_where_nothing_else_is_known() -> None:
    """They get longer as they are right, and reach to the last token but the one that is sure."""
    one = driver(plainly)
    assert one.plane.drafts_wanted() == []
    one.step(arrival(1, [5, 6, 7], max_tokens=15))
    asked = []
    while not one.ends:
        [(req_id, count)] = one.plane.drafts_wanted() or [(1, 0)]
        asked.append(count)
        length = 3 + len(one.tokens[1])
        one.step(Draft(req_id, length, right(length)))
    assert asked == [2, 4, 4, 0] and one.tokens[1] == list(right(3, 15))
    assert len(one.rows) == 5
    stats = one.plane.stats()
    assert stats.num_drafted_total == stats.num_accepted_total == 10


def test_a_draft_of_another_text_is_none_and_a_wrong_one_makes_a_pause() -> None:
    one = driver(plainly, page_size=1)
    one.step(arrival(1, [5, 6, 7], max_tokens=30))
    for length in (3, 6, -1, 2**70):
        assert len(one.step(Draft(1, length, right(4)))) == 1
    assert len(one.step(Draft(2, 8, right(8)))) == 1, "of nobody"
    assert len(one.step(Draft(1, 9, (1, 2, 3)))) == 3
    assert one.plane.drafts_wanted() == [] and len(one.tokens[1]) == 7, "it pauses for a token"
    assert len(one.step(Draft(1, 10, right(10)))) == 1
    assert one.plane.drafts_wanted() == [(1, 2)]
    assert len(one.step(Draft(1, 11, right(11)))) == 3
    assert one.plane.drafts_wanted() == [(1, 4)]
    one.run()
    assert one.tokens[1] == list(right(3, 30))
    stats = one.plane.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == 64


def test_a_draft_takes_the_place_of_a_guess_and_covers_a_token_in_flight() -> None:
    one = driver(max_running_requests=10)
    one.schedule(arrival(1, PROMPT, max_tokens=30), arrival(2, [50, 51], max_tokens=30))
    one.schedule(Draft(1, 12, (0, 1, 2)))
    assert one.plane.drafts_wanted() == [(2, 2)], "1 is guessed"
    one.commit()
    assert [row.req_id for row in one.rows[-1]] == [2], "1 waits for its token"
    one.step(Draft(1, 13, ()))
    assert [row.req_id for row in one.rows[-1]] == [1, 2], "nothing is to follow it"


def test_no_draft_is_wanted_for_requests_that_cannot_use_one() -> None:
    """Not while a prompt is computed in parts, nor where a step has no rows for everybody's."""
    one = driver(plainly, max_prefill_length=8)
    one.step(arrival(1, [5, 6, 7]), arrival(2, [8], no_drafts=True), arrival(3, [9], background=True))
    while len(one.tokens) < 3:
        one.step()
    assert [req_id for req_id, _ in one.plane.drafts_wanted()] == [], "8 rows are too few for three drafts of 4"
    one = driver(plainly, max_prefill_length=8, max_running_requests=20)
    one.step(arrival(1, [5, 6, 7]), arrival(2, [8], no_drafts=True))
    one.step()
    assert one.plane.drafts_wanted() == [(1, 1)], "it ends with the fourth"
    one.step(arrival(4, list(range(20))))
    assert one.plane.drafts_wanted() == []


@pytest.mark.parametrize("tokens", [(-1,), (3, 2**31), (2**70,)])
def test_an_empty_draft_is_ignored(tokens: tuple[int, ...]) -> None:
    one = driver()
    with pytest.raises(EventError, match="event 0: tokens: must be unsigned 31-bit integers"):
        one.schedule(Draft(1, 1, tokens))
