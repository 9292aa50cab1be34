"""What the background may add follows what steps took: the estimate alone, and in a loop on a simulated device whose
clock is only counted, eight clients beside a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from minisgl.engine.sim.profile import Profile, Table, load_profile
from minisgl.message import AddRequest
from minisgl.runner.background_share import LOOK_EVERY, REMEMBERED, SHARE, BackgroundShare
from minisgl.runner.loop import CLEAR_STEPS
from minisgl.runner.step_time import StepTime
from minisgl.sampling_params import SamplingParams
from minisgl.step import TOKEN_PARTS, StepPlan, TokenBudget
from tests.helpers.sim import Sim, constant, request

MOST = 2048
OTHERS = 8


def told(share: BackgroundShare, seconds: float, behind: int, others: int = OTHERS) -> bool:
    return share.measured(StepPlan(num_tokens=others + behind, num_background=behind), seconds)


def settled(step_s: float, token_s: float, noise_s: float = 0.0, num_steps: int = 2000) -> list[float]:
    """Tokens that a step may have, by step, on a device where one costs `token_s`."""
    rng, share, credit = random.Random(1), BackgroundShare(MOST), 0
    found = [1.0]
    for _ in range(num_steps):
        credit = min(credit, TOKEN_PARTS - 1) + share.gain
        behind = min(credit // TOKEN_PARTS, rng.randint(0, 300))
        credit -= behind * TOKEN_PARTS
        told(share, step_s + token_s * behind + rng.gauss(0, noise_s), behind)
        if share.gain > 1:
            found.append(share.gain / TOKEN_PARTS)
    return found


@pytest.mark.parametrize(("step_s", "token_s"), [(0.02, 0.001), (0.004, 0.00001), (0.5, 0.1), (0.01, 0.0007)])
def test_the_gain_converges_to_its_share_of_a_step(step_s: float, token_s: float) -> None:
    wanted = SHARE * step_s / token_s
    assert settled(step_s, token_s)[-1] == pytest.approx(wanted, rel=0.1)
    noisy = settled(step_s, token_s, noise_s=0.05 * step_s)
    assert wanted / 4 < sorted(noisy)[len(noisy) // 2] < 2 * wanted, "about, where steps differ by themselves"


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_where_the_first_tokens_cost_nothing_no_step_takes_much_longer(noise: float) -> None:
    """As on a GPU: 130 beside the weights, then 20 us for each one more, so that 139 take their share of 4 ms."""
    rng, share = random.Random(1), BackgroundShare(MOST)
    longer, bounds, gain = [], [], share.gain
    for step in range(6000):
        behind = min(gain // TOKEN_PARTS, 60 + 64 * (rng.randrange(8) == 0) + 64 * (rng.randrange(30) == 0))
        gain = share.gain  # a step is under way while the next one is decided
        longer.append(0.00002 * max(0, behind - 130) / 0.004)
        told(share, 0.004 * (1 + longer[-1]) * (1 + rng.gauss(0, noise)), behind)
        if step > 1000 and share.gain > 1:
            bounds.append(share.gain / TOKEN_PARTS)
    assert np.quantile(longer, 0.99) < SHARE + noise
    assert np.mean(longer) < SHARE / 4
    assert 100 < np.median(bounds) < 139 * (1 + 2 * noise) + 1


@pytest.mark.parametrize("longer", [1.1, 1.25, 2.0])
@pytest.mark.parametrize("turn", [100, 300, 1000])
def test_steps_of_others_that_take_longer_by_themselves_cost_the_background_little(longer: float, turn: int) -> None:
    """As on a GPU where clients come with short contexts and with long ones in turns: 130 tokens cost nothing."""
    share, counts = BackgroundShare(MOST), []
    for step in range(12_000):
        behind = min(share.gain // TOKEN_PARTS, 200)
        alone_s = 0.004 * (longer if step // turn % 2 else 1)
        told(share, alone_s + 0.00002 * max(0, behind - 130), behind)
        counts.append(behind)
    assert 100 < np.mean(counts[4000:]) < 170


def filled(share: BackgroundShare, num_steps: int, most: int, longer: Callable[[int], float]) -> list[float]:
    """Tokens that a step of 4 ms may have, by step, where they use them all, up to `most`, and it is `longer`."""
    found = []
    for _ in range(num_steps):
        behind = min(share.gain // TOKEN_PARTS, most)
        told(share, 0.004 * (1 + longer(behind)), behind)
        if share.gain > 1:
            found.append(share.gain / TOKEN_PARTS)
    return found


def test_two_slow_steps_of_a_size_lower_the_gain_at_once() -> None:
    share = BackgroundShare(MOST)
    assert filled(share, 20 * LOOK_EVERY + 9, 100, lambda behind: 0.0)[-1] == 200
    assert not told(share, 0.0048, 190)
    assert told(share, 0.0048, 190)
    assert 100 <= share.gain / TOKEN_PARTS < 140


def test_near_its_share_the_gain_grows_by_a_quarter() -> None:
    found = filled(BackgroundShare(MOST), 40 * LOOK_EVERY, MOST, lambda behind: 0.00036 * behind)
    assert max(after / before for before, after in pairwise(found) if before >= 64) < 1.26
    assert found[-1] == pytest.approx(SHARE / 0.00036, rel=0.1)


def test_a_size_that_took_too_long_is_tried_again() -> None:
    share = BackgroundShare(MOST)
    before = filled(share, 2000, 400, lambda behind: 4.0 * (behind > 130))
    assert 64 < before[-1] < 140
    assert filled(share, REMEMBERED + 16 * LOOK_EVERY, 400, lambda behind: 0.0)[-1] > 300


def test_free_tokens_are_allowed_step_by_step() -> None:
    found = settled(0.01, 0.0, num_steps=400)
    assert all(after <= 2 * before for before, after in pairwise(found))
    assert 256 < found[-1] <= 2 * 300, "twice of the most that a step had"


def test_only_two_steps_that_differ_in_the_background_alone_say_anything() -> None:
    share = BackgroundShare(MOST)
    for _ in range(LOOK_EVERY // 2 - 1):
        assert not told(share, 0.1, 0) and not told(share, 0.1, 0, others=500)
        assert not told(share, 0.3, 9) and not told(share, 0.3, 9), "others had more before"
        assert not told(share, 0.2, 7, others=0)


def test_a_disturbed_step_changes_little() -> None:
    share = BackgroundShare(MOST)
    for number in range(20 * LOOK_EVERY):
        told(share, 0.1 + 0.01 * (number % 2), number % 2)
    told(share, 0.1, 0)
    before = share.gain
    assert before == pytest.approx(0.5 * TOKEN_PARTS, rel=0.1)
    for number in range(4 * LOOK_EVERY):
        told(share, (9.0 if number == 5 else 0.1) + 0.01 * (number % 2), number % 2)
    told(share, 0.1, 0)
    assert share.gain == pytest.approx(before, rel=0.1)


# ----------------------------------------------------------------------------------------- eight clients and a batch


@dataclass(slots=True)
class Load:
    """`clients` that ask again a millisecond or two after each answer, and `lines` in the background all the time.
    Answers differ by `apart` tokens, so that clients do not come all at once."""

    sim: Sim
    clients: int
    lines: int
    num_tokens: int = 64
    apart: int = 24
    next_id: int = 0
    asked: dict[int, float] = field(default_factory=dict)  # of clients
    waiting: list[float] = field(default_factory=list)  # when they ask
    live: set[int] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def run(self, seconds: float) -> Load:
        self.waiting = [0.0] * self.clients
        while (now := self.sim.clock.now()) < seconds:
            for req_id in [one for one in self.live if one in self.sim.reasons]:
                self.live.remove(req_id)
                if req_id in self.asked:
                    self.waiting.append(now + 0.001 + self.rng.random() / 1000)
            messages = [self.ask(background=False) for at in self.waiting if at <= now]
            self.waiting = [at for at in self.waiting if at > now]
            num_lines = sum(req_id not in self.asked for req_id in self.live)
            messages += [self.ask(background=True) for _ in range(self.lines - num_lines)]
            if not self.live:
                self.sim.clock.sleep_until(min(self.waiting))
            self.sim.loop.step(messages)
        return self

    def ask(self, background: bool) -> AddRequest:
        self.next_id += 1
        length = 64 + (self.next_id * 7 % 16 if background else 0)
        tokens = (np.arange(length, dtype=np.int32) + 100 * self.next_id) % 1_000_000
        num_tokens = self.num_tokens + self.rng.randint(-self.apart, self.apart)
        sampling = SamplingParams(max_tokens=num_tokens, seed=self.next_id, ignore_eos=True)
        self.live.add(self.next_id)
        if not background:
            self.asked[self.next_id] = self.sim.clock.now()
        return AddRequest(self.next_id, tokens.tobytes(), sampling, background=background)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the later three quarters of a run. Times in ms."""

    ttft: np.ndarray[tuple[int], np.dtype[np.float64]]
    itl: np.ndarray[tuple[int], np.dtype[np.float64]]
    tok_s: float  # of clients
    machine_tok_s: float


def figures(
    profile: Profile, plane: str, clients: int, lines: int, seconds: float, bounded: bool = True, apart: int = 24
) -> Figures:
    step_time = StepTime(None, MOST, 4) if bounded else None
    sim = Sim(profile, plane=plane, max_rows=80, budget=MOST, num_pages=8000, step_time=step_time)
    load, warm = Load(sim, clients, lines, apart=apart).run(seconds), seconds / 4
    times = {req_id: np.array([at for at in ats if at > warm]) for req_id, ats in sim.times.items()}
    of_clients = [ats for req_id, ats in times.items() if req_id in load.asked]
    ttft = [sim.times[one][0] - at for one, at in load.asked.items() if at > warm and one in sim.times]
    itl = np.concatenate([np.diff(ats) for ats in of_clients] or [np.zeros(0)])
    counts = [sum(map(len, ats)) / (seconds - warm) for ats in (of_clients, times.values())]
    return Figures(1e3 * np.array(ttft), 1e3 * itl, counts[0], counts[1])


# 4.6 ms whatever a step computes, 1.6 a row and 1 a token of a prompt, as SmolLM2 on two cores
ROWS_COST = Profile(
    name="rows",
    table=Table(rows=(1, 64), prefill_tokens=(0, 1000), kv_len=(0,), ms=(((6.2,), (1006.2,)), ((107.0,), (1107.0,)))),
)
PLANES = pytest.mark.parametrize("plane", ["python", "rust_hotpath"])


@PLANES
def test_where_each_row_costs_time_clients_keep_their_rate(plane: str) -> None:
    alone = figures(ROWS_COST, plane, 8, 0, 30)
    beside = figures(ROWS_COST, plane, 8, 60, 30)
    assert figures(ROWS_COST, plane, 8, 60, 30, bounded=False).tok_s < alone.tok_s / 3, "as it was"
    assert beside.tok_s > 0.93 * alone.tok_s
    assert np.mean(beside.itl) < 1.08 * np.mean(alone.itl)
    assert np.percentile(beside.ttft, 95) < 1.05 * np.percentile(alone.ttft, 95)
    assert beside.machine_tok_s > beside.tok_s, "and the batch gets on"


@PLANES
def test_with_a_gpus_times_the_machine_is_used_and_steps_are_hardly_longer(plane: str) -> None:
    profile = load_profile("qwen3-8b-h200")
    alone, beside, batch = (figures(profile, plane, *counts, 8) for counts in ((8, 0), (8, 60), (0, 60)))
    worse = figures(profile, plane, 8, 60, 8, bounded=False)
    assert np.percentile(worse.itl, 99) > 1.5 * np.percentile(alone.itl, 99), "as it was"
    assert np.median(beside.itl) < 1.05 * np.median(alone.itl)
    assert np.percentile(beside.itl, 99) < 1.06 * np.percentile(alone.itl, 99)
    assert np.percentile(beside.ttft, 99) < 1.06 * np.percentile(alone.ttft, 99)
    assert beside.machine_tok_s > 0.92 * batch.machine_tok_s


@PLANES
def test_clients_that_come_back_while_only_lines_run_wait_for_one_step_of_theirs(plane: str) -> None:
    """All answers end at once, and for a millisecond or two nobody else is there."""
    profile = load_profile("qwen3-8b-h200")
    alone, beside = (figures(profile, plane, 8, lines, 4, apart=0) for lines in (0, 60))
    assert np.mean(beside.ttft) < 1.05 * np.mean(alone.ttft)
    assert np.percentile(beside.itl, 99) < 1.06 * np.percentile(alone.itl, 99)
    assert beside.machine_tok_s > 5 * alone.machine_tok_s


class Bound(StepTime):
    """Those in the background have hardly a token beside others, whatever steps take."""

    def __init__(self) -> None:
        super().__init__(None, MOST)
        self.budget = TokenBudget(MOST, MOST, 1)

    def measured(self, plan: StepPlan, seconds: float) -> bool:
        return False


@PLANES
@pytest.mark.parametrize(("num_lines", "away", "waits"), [(0, 5, 1), (3, 5, 1), (3, CLEAR_STEPS + 5, 2)])
def test_who_comes_back_waits_for_one_step_of_lines_though_no_line_ran_beside_others(
    plane: str, num_lines: int, away: int, waits: int
) -> None:
    """Who was away for long waits for two: then the next step is decided while one is under way, as always."""
    sim = Sim(constant(10), plane=plane, step_time=Bound())
    lines = [structs.replace(request(req_id, 8, 500), background=True) for req_id in range(1, num_lines + 1)]
    sim.loop.step([request(100, 8, 2 * CLEAR_STEPS), *lines])
    while 100 not in sim.reasons:
        sim.loop.step(())
    assert set(sim.tokens) == {100}
    for _ in range(away):
        sim.loop.step(())
    asked = sim.clock.now()
    sim.loop.step([request(101, 8, 4)])
    while 101 not in sim.times:
        sim.loop.step(())
    assert sim.times[101][0] - asked == pytest.approx(0.010 * waits)


@PLANES
def test_where_rows_cost_nothing_the_batch_has_what_it_had(plane: str) -> None:
    alone, beside, batch = (figures(constant(10), plane, *counts, 20) for counts in ((8, 0), (8, 60), (0, 60)))
    assert np.percentile(beside.itl, 99) < 1.01 * np.percentile(alone.itl, 99)
    assert np.percentile(beside.ttft, 99) < 1.05 * np.percentile(alone.ttft, 99)
    assert beside.machine_tok_s > 0.95 * batch.machine_tok_s
