"""A step by front end, beside a slow way to say the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.message import ID_LIMIT, PromptLogprobs, StepTokens, TokenLogprobs
from minisgl.runner.split import MAX_CONNECTIONS, owner, split, within
from tests.helpers.long_fuzz import for_long

Row = tuple[int, int, int]


def step_of(
    rows: Sequence[Row],
    admitted: Sequence[tuple[int, int]] = (),
    errors: dict[int, str] | None = None,
    logprobs: Sequence[TokenLogprobs] = (),
    prompts: Sequence[PromptLogprobs] = (),
) -> StepTokens:
    return StepTokens(
        step=9,
        req_ids=np.array([row[0] for row in rows], np.int64).tobytes(),
        tokens=np.array([row[1] for row in rows], np.int32).tobytes(),
        reasons=np.array([row[2] for row in rows], np.int32).tobytes(),
        admitted_ids=np.array([one[0] for one in admitted], np.int64).tobytes(),
        cached_lens=np.array([one[1] for one in admitted], np.int32).tobytes(),
        errors=errors or {},
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompts),
    )


numbers = st.sampled_from([0, 1, 2, 3, MAX_CONNECTIONS - 1])
own_ids = st.integers(0, 50) | st.sampled_from([ID_LIMIT - 1, ID_LIMIT - 2])
ids = st.builds(within, numbers, own_ids)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepTokens, dict[int, StepTokens]]:
    """A step, and what each front end should get of it: row by row."""
    among = draw(st.sets(numbers, min_size=1))
    mine = ids.filter(lambda req_id: owner(req_id) in among)
    found = draw(st.lists(mine, unique=True, max_size=40))
    rows = [(req_id, draw(st.integers(-1, 2**31 - 1)), draw(st.integers(0, 4))) for req_id in found]
    admitted = [(req_id, draw(st.integers(0, 9))) for req_id in draw(st.lists(mine, unique=True, max_size=5))]
    errors = {req_id: f"error of {req_id}" for req_id, _, reason in rows if reason == 4}
    logprobs = [TokenLogprobs(i, -i / 2, (i, 1), (-0.5, -1.0)) for i in range(len(rows)) if draw(st.booleans())]
    prompts = [PromptLogprobs(one, 1, (-1.0,), ((one & 7,),), ((-2.0,),)) for one in draw(st.lists(mine, max_size=3))]

    def own(req_id: int) -> int:
        return req_id % ID_LIMIT

    expected = {}
    for number in {owner(one) for one in [*found, *(a for a, _ in admitted), *(p.req_id for p in prompts)]}:
        places = [i for i, row in enumerate(rows) if row[0] // ID_LIMIT == number]
        expected[number] = step_of(
            [(own(rows[i][0]), rows[i][1], rows[i][2]) for i in places],
            [(own(req_id), cached) for req_id, cached in admitted if req_id // ID_LIMIT == number],
            {own(req_id): text for req_id, text in errors.items() if req_id // ID_LIMIT == number},
            [
                TokenLogprobs(places.index(one.index), one.logprob, one.top_ids, one.top_logprobs)
                for one in logprobs
                if one.index in places
            ],
            [
                PromptLogprobs(own(one.req_id), one.first, one.logprobs, one.top_ids, one.top_logprobs)
                for one in prompts
                if one.req_id // ID_LIMIT == number
            ],
        )
    return step_of(rows, admitted, errors, logprobs, prompts), expected


def check(case: tuple[StepTokens, dict[int, StepTokens]]) -> None:
    message, expected = case
    assert split(message) == expected


@given(steps())
@settings(max_examples=300)
def test_each_gets_its_own_rows(case: tuple[StepTokens, dict[int, StepTokens]]) -> None:
    check(case)


@pytest.mark.slow
def test_each_gets_its_own_rows_in_many_steps(times: int) -> None:
    for_long(check, given(steps()), settings(deadline=None), 4_000 * times)


def test_a_step_of_the_first_alone_is_passed_on_as_it_is() -> None:
    message = step_of([(1, 2, 0), (3, 4, 1)], [(1, 0)])
    assert split(message)[0] is message


def test_nothing_is_for_nobody() -> None:
    assert split(step_of([])) == {}
