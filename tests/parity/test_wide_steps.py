"""Parity of steps with more rows, and answers longer, than those of `test_differential`: ends of sequences that are
gathered for many steps, runs of decode rows that pressure and rows of other kinds cut."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.step import Abort, Arrival, Event, Finish
from tests.helpers.parity import Player

ROWS = 70
STEPS = 160


def arrival(draw: random.Random, req_id: int, shared: list[list[int]]) -> Arrival:
    tokens = draw.choice(shared)[: draw.randint(0, 30)] + [draw.randint(3, 9) for _ in range(draw.randint(1, 20))]
    return Arrival(
        req_id,
        np.array(tokens, np.int32),
        len(tokens),
        max_tokens=draw.choice((1, 17, 33, 120)),
        stop_ids=(4,) if draw.random() < 0.05 else (),
        min_tokens=draw.choice((0, 0, 20)),
        ignore_eos=draw.random() < 0.9,
        priority=draw.choice((0, 0, 0, 1, -1)),
        no_overlap=draw.random() < 0.05,
        no_match=draw.random() < 0.05,
        no_drafts=req_id % 5 == 0,
    )


@pytest.mark.parametrize("max_draft_len", [0, 6])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_schedulers_agree_on_wide_steps(page_size: int, tight: bool, overlap: bool, max_draft_len: int) -> None:
    draw = random.Random(f"{page_size} {tight} {overlap}")
    pages = (1600 if tight else 9000) // page_size
    config = ControlPlaneConfig(
        pages, page_size, ROWS, 300, 200, eos_ids=(2,), graph_sizes=(1, 8, 64), max_draft_len=max_draft_len
    )
    player = Player(config, overlap)
    shared = [[draw.randint(3, 9) for _ in range(30)] for _ in range(4)]
    widest = 0
    for step in range(STEPS):
        count = draw.randint(0, 12) if step < 100 else 0
        events: list[Event] = [arrival(draw, 100 * step + i, shared) for i in range(count)]
        if player.live and draw.random() < 0.2:
            told = draw.choice(player.live)
            events.append(Abort(told) if draw.random() < 0.5 else Finish(told))
        player.schedule(events, 102 if tight and step % 20 == 0 else None)
        if step % 40 == 39:
            for req_id in player.pair.ours.state.live:
                assert player.pair.ours.page_table(req_id) == player.pair.theirs.page_table(req_id)
            player.pair.check()
        if step == 90:
            player.fail()
        elif (rows := player.num_rows_due) is not None:
            widest = max(widest, rows)
            guessed = player.guessed()
            tokens = [draw.randint(2, 9) for _ in range(rows)]
            if max_draft_len:  # of few words texts repeat
                tokens = [token if token in (2, 9) else 3 + token % 2 for token in tokens]
            player.commit([guessed[row] if row in guessed and token < 9 else token for row, token in enumerate(tokens)])
    player.pair.check()
    stats = player.pair.theirs.stats()
    assert widest > 32, "the steps are not wide"
    if tight or overlap:  # else all rows are taken
        assert (stats.num_accepted_total > 50) == (max_draft_len > 0)
    if not max_draft_len:  # drafts end requests earlier
        assert bool(stats.num_retracted_total) == tight, "there is pressure, or there is not"
