"""Guesses of the reference; `tests/parity` compares those of Rust with them."""

from __future__ import annotations

import pytest

from minisgl.scheduler.reference.drafter import make_drafter


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 7, 8, 1, 2, 3, 4, 5], [7, 8, 1]),  # the last time, not the first
        ([1, 2, 3, 4, 5, 6, 7, 8], []),
        ([2, 3, 4, 5, 6, 1, 2, 3, 4, 5], []),  # four of five
        ([1, 2], []),
        ([7, 7, 7, 7, 7, 7], [7, 7, 7]),  # what repeats goes on repeating
        ([9, 1, 2, 1, 2, 1, 2, 1], [2, 1, 2]),
    ],
)
def test_what_came_after_the_same_tokens_the_last_time_comes_again(tokens: list[int], guess: list[int]) -> None:
    assert make_drafter(8).propose(tokens, 3) == guess
    grown = make_drafter(8)
    for length in range(1, len(tokens)):
        grown.propose(tokens[:length], 3)
    assert grown.propose(tokens, 3) == guess, "however the text came"


def test_wrong_guesses_are_followed_by_longer_and_longer_pauses() -> None:
    drafter, pauses = make_drafter(8), []
    for _ in range(11):
        drafter.learn(0, 100)
        pauses.append(drafter.paused_until - 100)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert drafter.draft_len == 2
    drafter.learn(1, 100)
    assert drafter.paused_until == 100
    drafter.learn(0, 100)
    assert drafter.paused_until == 101, "what was right once is trusted again"


def test_right_guesses_make_drafts_longer() -> None:
    drafter, lens = make_drafter(9), []
    for accepted in (2, 4, 8, 3, 1, 0):
        drafter.learn(accepted, 100)
        lens.append(drafter.draft_len)
    assert lens == [4, 8, 9, 6, 2, 2]
    assert make_drafter(1).draft_len == 1
