"""The budget of a step follows what steps took: the estimate alone, and in a loop on a simulated device whose clock is
only counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import EngineInfo
from minisgl.engine.echo import EchoEngine
from minisgl.engine.sim.profile import Profile, Table
from minisgl.message import AddRequest
from minisgl.runner.build import build_step_time
from minisgl.runner.loop import StepLoop, Timing
from minisgl.runner.step_time import ALONE, FIRST_TOKENS, StepTime
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.wrapped import WrappedControlPlane, make_faulty
from minisgl.step import TOKEN_PARTS, UNBOUNDED, Event, Events, StepPlan, TokenBudget
from tests.helpers.sim import Sim, request

STEP_S = 0.25
CONFIG = ControlPlaneConfig(64, 4, 4, 64, 256)
# 40 ms whatever a step computes, 5 a token of a prompt, and more than twice as much 8,000 tokens further on
SLOW = Profile(
    name="slow",
    table=Table(
        rows=(1, 8),
        prefill_tokens=(0, 1000),
        kv_len=(0, 8000),
        ms=(((40, 50), (5040, 12050)), ((48, 58), (5048, 12058))),
    ),
)


def took(time: StepTime, num_prefill: int, seconds: float, num_decode: int = 0) -> TokenBudget:
    prefills = num_prefill > 0
    rows = num_decode + prefills
    plan = StepPlan(num_rows=rows, num_decode_rows=num_decode, num_tokens=num_prefill + num_decode)
    before = time.budget
    assert time.measured(plan, seconds) == (time.budget != before)
    return tokens(time)


def tokens(time: StepTime) -> TokenBudget:
    """All but what is for the background, which `test_background_share` looks at."""
    return replace(time.budget, background=UNBOUNDED)


def test_budgets_start_small_and_adapt_after_one_step() -> None:
    time = StepTime(STEP_S, 2048)
    assert tokens(time) == TokenBudget(FIRST_TOKENS, FIRST_TOKENS)
    assert took(time, 32, 0.064) == TokenBudget(125, 500)
    assert tokens(StepTime(STEP_S, 10)) == TokenBudget(10, 10), "never beyond the most"
    assert took(StepTime(STEP_S, 2048, page_size=16), 32, 0.064) == TokenBudget(133, 508), "half a page more"
    assert took(StepTime(STEP_S, 2048), 32, 0.0) == TokenBudget(2048, 2048), "a device that takes no time"


def test_a_step_for_the_background_alone_is_full_with_what_it_may_have() -> None:
    time = StepTime(STEP_S, 2048)
    took(time, 32, 0.064)
    time.measured(StepPlan(num_rows=1, num_tokens=125), 0.125)
    assert tokens(time) == TokenBudget(125, 500), "beside nobody who decodes it would be full with 500"
    time.measured(StepPlan(num_rows=1, num_tokens=125, num_background=125), 0.125)
    assert tokens(time) == TokenBudget(250, 1000)


@pytest.mark.parametrize("fixed", [0.0, 0.04, 0.2])
def test_steps_come_to_the_time_asked_for_whatever_their_costs_consist_of(fixed: float) -> None:
    time = StepTime(STEP_S, 2048)
    for context in range(0, 20):
        cost = 0.002 * (1 + context / 20)  # a prompt's token
        num_tokens = time.budget.beside_decode
        seconds = fixed + cost * num_tokens
        took(time, num_tokens - 4, seconds, num_decode=4)
        if context > 8:
            assert seconds == pytest.approx(STEP_S, rel=0.15)


def test_a_disturbed_step_changes_nothing_and_a_slower_machine_soon_does() -> None:
    time = StepTime(STEP_S, 2048)
    for _ in range(3):
        took(time, 100, 0.2)
    assert took(time, 100, 5.0) == TokenBudget(125, 500)
    assert took(time, 125, 0.25) == TokenBudget(125, 500)
    for _ in range(2):
        found = took(time, 500, 4.0)
    assert found == TokenBudget(31, 125)


def test_a_step_that_was_neither_full_nor_late_says_nothing() -> None:
    time = StepTime(STEP_S, 2048)
    took(time, 100, 0.2)
    assert took(time, 3, 0.1) == took(time, 3, 0.1, num_decode=2) == TokenBudget(125, 500)
    assert took(time, 0, 0.02, num_decode=4) == took(time, 0, 0.0) == TokenBudget(125, 500), "nor one without a prompt"
    took(time, 1, 1.0, num_decode=3)
    assert took(time, 2, 1.0, num_decode=2) == TokenBudget(1, 4), "though small, they were late"


@pytest.mark.parametrize(
    ("decode_s", "longest_s"),
    [(0.01, 0.25), (0.05, 0.25), (0.08, 0.4), (0.15, 0.4), (0.6, 1.2)],
)
def test_where_decoding_is_slow_a_step_takes_longer_so_that_prompts_move(decode_s: float, longest_s: float) -> None:
    time = StepTime(STEP_S, 10**6)
    for _ in range(3):
        took(time, 0, decode_s, num_decode=60)
    budget = took(time, 1024, 1.0)
    assert budget.beside_decode == pytest.approx(1024 * longest_s, abs=1)
    assert budget.prefill_only == pytest.approx(ALONE * 1024 * longest_s, abs=1)


def info(name: str, device: str) -> EngineInfo:
    return EngineInfo(name, None, 256, 4096, (), 512, 4, device, "none")


def test_which_engines_have_a_step_time_limit() -> None:
    def found(name: str, device: str, step_ms: int | None = None, serves: bool = True) -> int | None:
        config = EngineConfig(max_step_ms=step_ms)
        made = build_step_time(config, info(name, device), serves=serves)
        return made and took(made, 32, 32 / 1024).beside_decode  # of a device that computes 1,024 tokens a second

    assert found("cpu", "cpu") == found("torch", "cpu") == 258, "servers on a CPU: 256, and half a page"
    assert found("cpu", "cpu", serves=False) is found("torch", "cuda:0", serves=False) is None
    anything = [found("torch", "cuda:0"), found("echo", "cpu"), found("sim", "simulated x"), found("cpu", "cpu", 0)]
    assert all(one and one > 1000 for one in anything), "any step, but for what the background adds to it"
    assert found("torch", "cuda:0", 30) == found("sim", "simulated x", 30, serves=False) == 32, "who asks for one"
    with pytest.raises(ConfigError, match="--max-step-ms -1"):
        EngineConfig(max_step_ms=-1).check()


# ------------------------------------------------------------------------------------------------- with a scheduler


def long_prompt(step_ms: int, plane: str, others: int = 4) -> tuple[Sim, list[float]]:
    """`others` decode; then a prompt of 3,000 tokens comes, and a short one right behind it. The gaps of the others
    from then on."""
    step_time = StepTime(step_ms / 1000, 2048) if step_ms else None
    sim = Sim(SLOW, plane=plane, budget=2048, step_time=step_time)
    streams = [request(i, 20, 400) for i in range(others)]
    sim.loop.step(streams)
    while any(len(sim.times.get(one.req_id, ())) < 20 for one in streams):
        sim.loop.step(())
    began = sim.clock.now()
    prompts = [AddRequest(8, np.arange(3000, dtype=np.int32).tobytes(), request(8, 1, 2).sampling), request(9, 3, 2)]
    sim.loop.step(prompts)
    while 8 not in sim.times or 9 not in sim.times:
        sim.loop.step(())
    gaps: list[float] = []
    for one in streams:
        times = np.array([at for at in sim.times[one.req_id] if at >= began])
        gaps += np.diff(times).tolist()
    return sim, [*gaps, sim.times[8][0] - began]


@pytest.mark.parametrize("plane", ["python", "rust_hotpath"])
def test_a_long_prompt_does_not_hold_up_those_who_decode(plane: str) -> None:
    _, (*free, free_ttft) = long_prompt(0, plane)
    _, (*held, held_ttft) = long_prompt(1000, plane)
    assert max(free) > 8, "without it the streams wait for the prompt"
    assert 0.8 < sorted(held)[len(held) // 2] <= max(held) < 1.2
    assert held_ttft < 1.15 * free_ttft
    _, (*short, _) = long_prompt(100, plane)
    assert max(short) < 0.25, "twice what was asked for: decoding alone takes 40 ms"


@pytest.mark.parametrize("plane", ["python", "rust_hotpath"])
def test_a_lone_prompt_takes_longer_steps_which_are_bounded_too(plane: str) -> None:
    sim, (free_ttft,) = long_prompt(0, plane, others=0)
    held, (held_ttft,) = long_prompt(250, plane, others=0)
    assert free_ttft > 10 and sim.loop.num_steps < 8
    assert held_ttft < 1.15 * free_ttft
    assert ALONE * STEP_S * 0.5 < held_ttft / held.loop.num_steps < ALONE * STEP_S


class Told(WrappedControlPlane):
    """Keeps the events of each call."""

    def __init__(self) -> None:
        super().__init__(make_control_plane("python", CONFIG))
        self.events: list[list[Event]] = []

    def schedule(self, step: int, events: Events) -> StepPlan:
        self.events.append(list(events))
        return super().schedule(step, events)


@pytest.mark.parametrize("broken", [None, "schedule:5:before", "commit:5:before"])
def test_each_budget_is_sent_once_and_first_to_a_fallback_scheduler(broken: str | None) -> None:
    first, second, step_time = Told(), Told(), StepTime(STEP_S, 64)
    plane = make_faulty(first, broken) if broken else first
    engine = EchoEngine(num_pages=64, page_size=4, max_rows=4, max_seq_len=256, context_len=256, worker_thread=False)
    loop = StepLoop(plane, engine, lambda messages: None, fallback=lambda: second, timing=Timing(step_time=step_time))
    loop.step([request(0, 150, 10)])
    while not loop.idle:
        loop.step(())
    told = [event for call in first.events + second.events for event in call if isinstance(event, TokenBudget)]
    assert told[0] == TokenBudget(32, 32, TOKEN_PARTS) == first.events[0][0] and told[-1] == step_time.budget
    if broken:
        assert second.events[0][0] == told[-1] and len(second.events[0]) == 2
    else:
        assert len(told) == len(set(told)) > 1
