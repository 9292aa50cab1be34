"""What requests in the background may add to a step beside others, and what they are guaranteed."""

from __future__ import annotations

import random

import pytest

from minisgl.step import TOKEN_PARTS, UNBOUNDED, Abort, Arrival, Event, TokenBudget
from tests.helpers.scheduler import Driver, Row, arrival, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

PAGE = 4


def behind(req_id: int, length: int, max_tokens: int) -> Arrival:
    return arrival(req_id, [req_id] * length, max_tokens, background=True)


def bound(tokens: float) -> TokenBudget:
    return TokenBudget(64, 64, int(tokens * TOKEN_PARTS))


def beside(tokens: float, *events: Event, max_tokens: int = 100, **config: object) -> Driver:
    """Number 0 decodes, and those in the background may add so many tokens to its steps."""
    driver = Driver(**({"num_pages": 400, "max_running_requests": 16} | config))
    driver.step(bound(tokens), arrival(0, [5], max_tokens))
    driver.step(*events)
    return driver


def decoding(tokens: float, count: int = 3, **config: object) -> Driver:
    """So many of them decode when number 0 comes."""
    driver = Driver(num_pages=400, max_running_requests=16, **config)
    driver.step(*(behind(i, 3, 60) for i in range(1, count + 1)))
    driver.step(arrival(0, [5], 60), bound(tokens))
    driver.step()
    return driver


def rows_of(driver: Driver, num_steps: int) -> list[list[int]]:
    """Of the background, by step: how many tokens each computes."""
    return [[count for req_id, count in lengths(driver.step()) if req_id] for _ in range(num_steps)]


# ------------------------------------------------------------------------------------------------------- how much


def test_without_a_bound_every_background_request_gets_its_tokens() -> None:
    driver = decoding(UNBOUNDED // TOKEN_PARTS)
    assert rows_of(driver, 2) == [[1, 1, 1]] * 2
    assert driver.plan.num_background == 3


def test_background_decode_rows_beside_others_stay_within_the_bound_in_order() -> None:
    driver = decoding(2)
    assert [lengths(driver.step()) for _ in range(3)] == [[(0, 1), (1, 1), (2, 1)]] * 3
    driver.step(Abort(1))
    assert lengths(driver.step()) == [(0, 1), (2, 1), (3, 1)], "the third had paused, and goes on"


def test_a_part_of_a_token_is_one_every_few_steps() -> None:
    driver = decoding(0.25, count=1)
    assert [count for counts in rows_of(driver, 40) for count in counts] == [1] * 10
    assert driver.plan.num_background == len(lengths(driver.rows[-1])) - 1


def test_a_page_is_begun_with_one_token_of_credit_and_paid_for_by_later_steps() -> None:
    driver = beside(1, behind(1, 40, 4))
    found = [sum(counts) for counts in rows_of(driver, 33)]
    assert lengths(driver.rows[1]) == [(0, 1), (1, PAGE)]
    assert found[:8] == [0, 0, 0, PAGE, 0, 0, 0, PAGE]
    assert sum(found) == 33 // PAGE * PAGE


def test_a_larger_bound_cuts_chunks_to_pages_and_what_is_not_used_is_lost() -> None:
    driver = beside(10, behind(1, 40, 9))
    assert rows_of(driver, 3) == [[8], [8], [8]]
    idle = beside(10)
    for _ in range(20):
        idle.step()
    assert lengths(idle.step(behind(1, 40, 9)))[1:] == [(1, 8)], "no more than a step's"


def test_a_step_with_a_prompt_of_others_has_a_twentieth_of_it_at_most() -> None:
    driver = decoding(30, count=12)
    assert rows_of(driver, 1) == [[1] * 12]
    rows = driver.step(arrival(100, [7] * 60, 9))
    assert sum(0 < req_id < 100 for req_id, _ in lengths(rows)) == 61 // 20 + 1, (
        "and less than a token of the last step"
    )
    assert rows_of(driver, 1) == [[1] * 13], "the next has none"
    rows = driver.step(arrival(101, [9] * 20, 9))
    assert sum(0 < req_id < 100 for req_id, _ in lengths(rows)) == 30 - 22, "or what it leaves of the bound"


def test_a_request_between_two_of_its_tokens_is_one_of_the_others() -> None:
    driver = decoding(1)
    driver.step(Abort(0), arrival(20, [6], 60, no_overlap=True))
    driver.schedule()
    counts = []
    for _ in range(6):
        counts.append([req_id for req_id, _ in lengths(driver.schedule())])
        driver.commit()
    assert [20 in one for one in counts] in ([True, False] * 3, [False, True] * 3)
    assert all(len(one) - (20 in one) == 1 for one in counts)


# --------------------------------------------------------------------------------------------------- nobody else there


def test_with_nobody_else_there_the_bound_grows_by_a_quarter_from_step_to_step() -> None:
    driver = decoding(1, count=12)
    driver.step(Abort(0))
    pace = [1.25**step for step in range(1, 13)]
    assert [len(counts) for counts in rows_of(driver, 12)] == [min(12, int(tokens)) for tokens in pace]
    driver.step(arrival(100, [5], 60))
    driver.step()
    assert [len(counts) - 1 for counts in rows_of(driver, 2)] == [1, 1], "and at once it is what it was"


def test_a_step_that_nobody_else_is_in_is_as_long_as_one_beside_a_row_that_decodes() -> None:
    """Whoever comes waits for its end; beside a prompt of others, which must be there, it may be longer."""
    driver = Driver(num_pages=400, max_running_requests=16)
    budget = TokenBudget(12, 48, UNBOUNDED)
    assert lengths(driver.step(budget, *(behind(i, 60, 5) for i in range(1, 4)))) == [(1, 12)]
    assert lengths(driver.step()) == [(1, 12)]
    assert lengths(driver.step(arrival(100, [5] * 20, 9))) == [(100, 20), (1, 28)]
    assert lengths(driver.step()) == [(100, 1), (1, 8)], "and no whole page of another one"


def test_background_requests_get_the_whole_budget_before_any_other_arrives() -> None:
    driver = Driver(num_pages=400, max_running_requests=16)
    assert lengths(driver.step(bound(0.5), *(behind(i, 8, 5) for i in range(8)))) == [(i, 8) for i in range(8)]


# ------------------------------------------------------------------------------------------------------- guaranteed


def of(rows: list[Row], background: bool) -> list[Row]:
    """Those in the background have odd ids."""
    return [row for row in rows if row.req_id % 2 == background]


def test_background_tokens_stay_within_the_guaranteed_bounds(times: int) -> None:
    """Of the docstring of `reference.background`, over whole runs."""
    for seed in range(15 * times):
        rng = random.Random(seed)
        gain = rng.choice((1, 100, 700, 1024, 3000, 20_000))
        overlap, steps = rng.randrange(2), 120
        driver = Driver(num_pages=3000, page_size=PAGE, max_running_requests=400, max_prefill_length=200)
        driver.step(TokenBudget(200, 200, gain), arrival(0, [5], 10**6))
        driver.step()
        allowed = 0.0
        found: list[int] = []
        for step in range(steps):
            events: list[Event] = []
            for req_id in range(4 * step + 1, 4 * step + 5):
                if rng.randrange(6) == 0:
                    events.append(arrival(req_id, [req_id] * rng.randint(1, 30), 30, background=req_id % 2 == 1))
            rows = driver.schedule(*events)
            while len(driver.uncommitted) > overlap:
                driver.commit()
            others = of(rows, background=False)
            count = sum(row.extend_len for row in of(rows, background=True))
            assert count == driver.plan.num_background
            assert count <= (gain + 1023) // 1024 + PAGE - 1, seed
            tokens = sum(row.extend_len for row in others)
            prompts = any(row.extend_len > 1 or row.seq_len == 1 for row in others)
            more = tokens * TOKEN_PARTS
            allowed += min(gain, max(gain - more, more // 20)) if prompts else gain
            found.append(count)
            assert sum(found) <= allowed / TOKEN_PARTS + PAGE, seed
        if gain >= 700:
            window = -(-PAGE * TOKEN_PARTS // 50)  # a lone token of a prompt counts for as little as 51 parts
            assert all(sum(found[at : at + window]) for at in range(10, steps - window)), (seed, found)
            assert sum(found) > 0


def test_every_background_request_ends_beside_permanent_others() -> None:
    rng = random.Random(3)
    driver = beside(0.5, *(behind(i, rng.randint(1, 12), rng.randint(1, 9)) for i in range(1, 13)), max_tokens=10**6,
                    num_pages=4000, context_len=10_000)  # fmt: skip
    for _ in range(600):
        driver.step()
    assert sorted(driver.ends) == list(range(1, 13))


def test_page_shortage_of_background_requests_does_not_affect_others() -> None:
    """Those that pause keep their pages, and give them up as ever."""
    driver = decoding(1, count=3)
    held = driver.plane.stats().num_held_pages
    for _ in range(3):
        driver.step()
    assert driver.plane.stats().num_held_pages >= held
    driver.step(arrival(50, [8] * 200, 9), TokenBudget(500, 500, 1))
    for _ in range(20):
        driver.step()
    assert 50 in driver.ends


@pytest.mark.parametrize("background", [0, -1])
def test_no_bound_is_below_one(background: int) -> None:
    with pytest.raises(ValueError, match="background: must be at least 1"):
        Driver().schedule(TokenBudget(5, 5, background))
