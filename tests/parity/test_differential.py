"""The Rust scheduler beside the Python reference: the same events give the same plans, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.scheduler.api import ControlPlaneConfig, Stats, part_failures
from minisgl.scheduler.policies import PART_NAMES
from minisgl.scheduler.reference.request import Request
from minisgl.step import NOT_FINITE, Abort, ClearCache, Draft, Event, Finish, PagesRead, TokenBudget, Unpin
from tests.helpers.parity import Divergence, Draw, Pair, Player, draw_arrival


def draw_config(draw: Draw) -> ControlPlaneConfig:
    page_size = (1, 4, 16)[draw(0, 2)]
    config = ControlPlaneConfig(
        num_pages=draw(8, 64 if page_size == 1 else 24),
        page_size=page_size,
        max_running_requests=draw(1, 8),
        max_prefill_length=(1, 5, 24, 256)[draw(0, 3)],
        context_len=(24, 64, 300)[draw(0, 2)],
        eos_ids=(2,),
        cache=("lru", "lru", "lfu", "naive")[draw(0, 3)],  # type: ignore[arg-type]
        graph_sizes=((), (1, 2, 4, 8))[draw(0, 1)],
        cache_token_budget=draw(0, 3) * 20 if draw(0, 3) == 0 else 0,
        cache_max_prompt=draw(1, 30) if draw(0, 3) == 0 else 0,
        max_draft_len=draw(1, 5) if draw(0, 1) else 0,
        schedule_policy=("fcfs", "lpm", "srpf")[draw(0, 2)],  # type: ignore[arg-type]
    )
    if not config.max_draft_len and draw(0, 1):
        interval, slots = page_size * draw(1, 4), draw(0, 9)
        config = replace(config, checkpoint_interval=interval, num_checkpoints=slots)
    return replace(config, max_pinned_pages=draw(0, config.num_pinnable_pages))


def draw_steering(draw: Draw, next_id: int) -> list[Event]:
    """What is done to the cache and to the budget in a step, and what was read for it; ids of requests that may have a
    pin, or wait, or had one, or never lived."""
    events: list[Event] = []
    if draw(0, 12) == 0:
        events.append(Unpin(draw(0, next_id)))
    if draw(0, 30) == 0:
        events.append(ClearCache())
    if draw(0, 4) == 0:
        events.append(PagesRead(draw(0, next_id), draw(0, 3) // 2, draw(0, 12)))
    if draw(0, 8) == 0:
        events.append(draw_budget(draw))
    return events


def draw_drafts(draw: Draw, live: Mapping[int, Request]) -> list[Event]:
    """Of texts as they are, or as they were or will be; too long ones, and of requests that never lived."""
    found: list[Event] = []
    for req_id, request in live.items():
        length = len(request.tokens) + (draw(-2, 2) if draw(0, 4) == 0 else 0)
        tokens = tuple(draw(0, 2) for _ in range(draw(0, 7)))
        found.append(Draft(req_id if draw(0, 20) else 10**9, length, tokens))
    return found


def draw_budget(draw: Draw) -> TokenBudget:
    background = (1, 300, 2000, 9000, 2**40, 10**14)[draw(0, 5)]
    return TokenBudget(draw(1, 20), draw(1, 40) if draw(0, 3) else 10**12, background)


def run(draw: Draw, num_steps: int, backend: str = "rust_hotpath") -> Pair:
    """`num_steps` steps of one configuration. Raises `Divergence`."""
    config = draw_config(draw)
    player = Player(config, overlap=draw(0, 1) == 1, backend=backend)
    limit = config.limits().max_seq_len
    load = draw(1, 6)
    breaks = draw(0, 2) == 0
    drafts = draw(0, 1) == 1
    next_id, sequences = 1, list[list[int]]()
    for _ in range(num_steps):
        events: list[Event] = []
        for _ in range(draw(0, 2) if draw(0, load) == 0 else 0):
            arrived = replace(draw_arrival(draw, next_id, limit, sequences), pin=draw(0, 3) == 0)
            events.append(arrived)
            sequences = [*sequences[-8:], arrived.tokens.tolist()]
            next_id += 1
        if player.live and draw(0, 12) == 0:
            req_id = player.live[draw(0, len(player.live) - 1)] if draw(0, 9) else 10**9
            events.append(Abort(req_id) if draw(0, 1) else Finish(req_id))
        events += draw_steering(draw, next_id)
        if drafts and draw(0, 2):
            events += draw_drafts(draw, player.pair.ours.state.live)
        ratio = (102, 1024)[draw(0, 1)] if draw(0, 40) == 0 else None
        player.schedule(events, ratio)
        if draw(0, 150) == 0:
            player.fail()
            continue
        if (num_rows := player.num_rows_due) is not None:
            guessed = player.guessed() if draw(0, 2) else {}
            tokens = [guessed.get(row, draw(0, 2)) for row in range(num_rows)]
            if breaks and draw(0, 8) == 0 and num_rows:  # a row, sampling or not
                tokens[draw(0, num_rows - 1)] = NOT_FINITE
            player.commit(tokens)
        if draw(0, 7) == 0:
            player.pair.check()
    player.pair.ours.check()
    player.pair.check()
    return player.pair


STEPS = 250  # of one run
PARTS_IN_RUST = [
    "rust_parts:" + ",".join(names) for count in (1, 2, 3) for names in itertools.combinations(PART_NAMES, count)
]


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_schedulers_agree_on_20_000_steps(first: int) -> None:
    retracted = cached = 0
    for seed in range(first, first + 20):
        stats = check_seed(seed)
        retracted += stats.num_retracted_total
        cached += stats.num_cached_tokens_total
    assert retracted and cached, "the runs are too easy"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_schedulers_agree_on_half_a_million_steps(times: int) -> None:
    for seed in range(1_000_000, 1_000_000 + times * 2000):
        check_seed(seed)


@pytest.mark.parametrize("backend", PARTS_IN_RUST)
def test_schedulers_agree_with_any_parts_in_rust(backend: str) -> None:
    cached = sum(check_seed(seed, backend).num_cached_tokens_total for seed in range(80, 88))
    assert cached, "the runs are too easy"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", PARTS_IN_RUST)
def test_schedulers_agree_with_any_parts_in_rust_on_many_steps(backend: str, times: int) -> None:
    for seed in range(2_000_000, 2_000_000 + times * 100):
        check_seed(seed, backend)


def check_seed(seed: int, backend: str = "rust_hotpath") -> Stats:
    try:
        plane = run(random.Random(seed).randint, STEPS, backend).theirs
    except Divergence as error:
        raise AssertionError(f"{backend}, seed {seed}: {error}") from error
    assert not part_failures(plane), "a part failed, and its twin was compared"
    return plane.stats()  # type: ignore[no-any-return]


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_schedulers_agree_on_runs_drawn_by_hypothesis(data: st.DataObject) -> None:
    """The same runs drawn by hypothesis: a divergence comes back with a minimal list of events."""
    run(lambda low, high: data.draw(st.integers(low, high)), 25)
