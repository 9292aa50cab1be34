"""Prefixes in the step loop, exact on the echo engine: what is warmed is found, what is pinned stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.engine.echo import EchoEngine, EchoModel
from minisgl.message import (
    AbortRequest,
    AddPrefix,
    AddRequest,
    CacheCleared,
    ClearCache,
    FromEngine,
    PrefixChanged,
    PrefixState,
    RemovePrefix,
    StepTokens,
    ToEngine,
)
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.runner.prefixes import MAX_PREFIXES, MAX_TRIES, Prefixes
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import FinishReason
from tests.helpers.received import Received

# A step loop on the echo engine that is told of prefixes: what it answers, and what requests beside them get.
MAX_STEPS = 5000
PAGE = 4
NUM_PAGES = 64
CONTEXT = 100
EOS_IDS = (256,)


def config(**more: int) -> ControlPlaneConfig:
    """64 pages of 4 tokens, 4 rows, 16 tokens a step; as much as possible may be pinned."""
    num_pages = more.pop("num_pages", NUM_PAGES)
    plain = ControlPlaneConfig(num_pages, PAGE, 4, 16, CONTEXT, EOS_IDS)
    return replace(plain, **{"max_pinned_pages": plain.num_pinnable_pages, **more})


class PrefixLoop(Received):
    """`said`: states of prefixes by id, in order."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        overlap: bool = True,
        fallback: Callable[[], ControlPlane] | None = None,
        fail_steps: Sequence[int] = (),
        keeps_prefixes: bool = True,
    ) -> None:
        self.engine = EchoEngine(
            num_pages=plane.buffers.limits.num_pages,
            page_size=PAGE,
            max_rows=4,
            max_seq_len=CONTEXT,
            context_len=CONTEXT,
            worker_thread=False,
        )
        self.engine.fail_steps.update(fail_steps)
        self.loop = StepLoop(
            plane,
            self.engine,
            self._take,
            fallback=fallback,
            settings=LoopSettings(overlap=overlap, keeps_prefixes=keeps_prefixes),
        )
        super().__init__()
        self.said: dict[int, list[str]] = {}
        self.refusals: dict[int, PrefixChanged] = {}
        self.cleared: list[int] = []
        self._requests: dict[int, tuple[list[int], int]] = {}
        self._next_id = 0

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            match message:
                case PrefixChanged(prefix_id, state):
                    self.said.setdefault(prefix_id, []).append(state)
                    if state in ("refused", "failed"):
                        self.refusals[prefix_id] = message
                case CacheCleared(num_pages):
                    self.cleared.append(num_pages)
                case StepTokens():
                    self.take_step(message)
                case _:
                    raise AssertionError(f"not expected here: {message}")

    def take_step(self, message: StepTokens) -> None:
        told = np.frombuffer(message.admitted_ids + message.req_ids, np.int64).tolist()
        assert all(i in self._requests for i in told), "a row that nobody asked for"
        super().take_step(message)

    # --------------------------------------------------------------------------------------------------------- orders

    def request(self, prompt: Sequence[int], max_tokens: int = 3) -> AddRequest:
        req_id, self._next_id = self._next_id, self._next_id + 1
        self._requests[req_id] = (list(prompt), max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, seed=req_id, ignore_eos=True)
        return AddRequest(req_id, np.array(prompt, np.int32).tobytes(), sampling)

    def step(self, *messages: ToEngine) -> None:
        self.loop.step(messages)
        self.loop.control_plane.check()

    def run(self, *messages: ToEngine) -> None:
        """Until nothing is left to do."""
        self.step(*messages)
        for _ in range(MAX_STEPS):
            if self.loop.idle:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def ask(self, prompt: Sequence[int], max_tokens: int = 3) -> int:
        """One request alone, whole; how many of its tokens were cached."""
        message = self.request(prompt, max_tokens)
        self.run(message)
        self.check_texts()
        return self.cached[message.req_id]

    # --------------------------------------------------------------------------------------------------------- answers

    def check_texts(self) -> None:
        """Each request that has ended by itself got what it gets alone, the others the beginning of it."""
        for req_id, (prompt, max_tokens) in self._requests.items():
            alone = EchoModel(seed=req_id).generate(prompt, max_tokens, ignore_eos=True)
            got, reason = self.tokens.get(req_id, []), self.reasons.get(req_id)
            whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert got == alone if whole else got == alone[: len(got)], (req_id, got, alone)

    def states(self) -> dict[int, PrefixState]:
        return {one.prefix_id: one for one in self.loop.prefixes.states()}

    def prefix_tokens(self, prefix_id: int) -> list[int]:
        found: list[int] = self.loop.prefixes._by_id[prefix_id].tokens.tolist()
        return found

    @property
    def num_pinned_pages(self) -> int:
        return self.loop.control_plane.stats().num_pinned_pages


def prefix(prefix_id: int, tokens: Sequence[int], *, pin: bool = True) -> AddPrefix:
    return AddPrefix(prefix_id, np.array(tokens, np.int32).tobytes(), pin)


def text(first: int, length: int) -> list[int]:
    """Tokens that share no page with those of another `first`."""
    return [first, *((first * 31 + i * 7) % 250 for i in range(length - 1))]


Make = Callable[[ControlPlaneConfig], ControlPlane]
SYSTEM = text(1, 26)  # six pages and two tokens


def fill(loop: PrefixLoop, first: int = 100) -> None:
    """Requests that need every page that is not pinned, one after the other."""
    for i in range(6):
        loop.ask(text(first + i, 90), max_tokens=6)


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_warmed_prefix_is_matched(control_plane: Make, pin: bool, overlap: bool) -> None:
    loop = PrefixLoop(control_plane(config()), overlap=overlap)
    loop.run(prefix(5, SYSTEM, pin=pin))
    assert loop.said == {5: ["warming", "ready"]}
    assert loop.tokens == {} and loop.cached == {}, "its own token is for nobody"
    assert loop.ask([*SYSTEM, 9, 9, 9]) == 24
    assert loop.ask(text(2, 30)) == 0
    state = loop.states()[5]
    assert (state.num_tokens, state.is_ready, state.is_pinned, state.num_hits) == (26, True, pin, 1)


def test_hits_are_counted_by_cached_tokens(control_plane: Make) -> None:
    """A prompt that is the prefix itself, one that has more, one that ends before it, one of other tokens in its last
    page, and a prefix of the prefix."""
    loop = PrefixLoop(control_plane(config()))
    loop.run(prefix(1, SYSTEM), prefix(2, SYSTEM[:8]), prefix(3, text(3, 8)))
    for prompt in (SYSTEM, [*SYSTEM, 1], SYSTEM[:20], [*SYSTEM[:24], 240, 241, 242], [*text(4, 8), *SYSTEM]):
        loop.ask(prompt)
    assert {i: one.num_hits for i, one in loop.states().items()} == {1: 2, 2: 4, 3: 0}


def test_a_prompt_of_whole_pages_hits_all_of_them(control_plane: Make) -> None:
    """Its last page is computed all the same."""
    loop = PrefixLoop(control_plane(config()))
    loop.run(prefix(1, SYSTEM[:24]))
    assert loop.ask(SYSTEM[:24]) == 20
    assert loop.states()[1].num_hits == 1


def test_pinned_pages_survive_what_evicts_everything_else(control_plane: Make) -> None:
    loop = PrefixLoop(control_plane(config()))
    other = text(2, 26)
    loop.run(prefix(1, SYSTEM, pin=True), prefix(2, other, pin=False))
    assert loop.num_pinned_pages == 6
    assert loop.ask([*other, 9]) == 24
    fill(loop)
    assert loop.ask([*other, 9]) == 0
    assert loop.ask([*SYSTEM, 9]) == 24
    assert loop.num_pinned_pages == 6


def test_a_removed_prefix_may_be_evicted(control_plane: Make) -> None:
    loop = PrefixLoop(control_plane(config()))
    loop.run(prefix(1, SYSTEM), prefix(2, SYSTEM))
    loop.run(RemovePrefix(1))
    assert loop.said[1][-1] == "removed" and set(loop.states()) == {2}
    fill(loop)
    assert loop.ask([*SYSTEM, 9]) == 24, "the other prefix of the same tokens holds it"
    loop.run(RemovePrefix(2), RemovePrefix(2), RemovePrefix(7))
    assert loop.said[2][-2:] == ["removed", "unknown"] and loop.said[7] == ["unknown"]
    assert loop.num_pinned_pages == 0 and loop.states() == {}
    assert loop.ask([*SYSTEM, 9]) == 24, "nobody needed the room yet"
    fill(loop)
    assert loop.ask([*SYSTEM, 9]) == 0
    stats = loop.loop.control_plane.stats()
    assert stats.num_free_pages + stats.num_evictable_pages == NUM_PAGES


@pytest.mark.parametrize("num_steps", range(5))
def test_a_prefix_may_be_removed_while_it_is_computed(control_plane: Make, num_steps: int) -> None:
    loop = PrefixLoop(control_plane(config()))
    loop.step(prefix(1, text(1, 60)))
    for _ in range(num_steps):
        loop.step()
    loop.run(RemovePrefix(1))
    assert loop.said[1][0] == "warming" and loop.said[1][-1] == "removed"
    assert loop.num_pinned_pages == 0 and loop.tokens == {}


def test_warming_delays_no_request(control_plane: Make) -> None:
    """While there are pages for all, requests get their tokens in the very steps in which they get them without."""

    def steps_of(*prefixes: AddPrefix) -> list[tuple[int, ...]]:
        loop = PrefixLoop(control_plane(config(num_pages=256)))
        messages = [loop.request(text(10 + i, 5 + 9 * i), max_tokens=8) for i in range(7)]
        found = []
        for step in range(60):
            arrive = [one for one in messages if one.req_id * 3 == step]
            loop.step(*(prefixes if step == 0 else ()), *arrive)
            found.append(tuple(len(loop.tokens.get(one.req_id, ())) for one in messages))
        assert len(loop.reasons) == 7
        loop.run()
        loop.check_texts()
        assert all(states[-1] == "ready" for states in loop.said.values()) and len(loop.said) == len(prefixes)
        return found

    assert steps_of(prefix(1, text(1, 60)), prefix(2, text(2, 60), pin=False), prefix(3, text(3, 30))) == steps_of()


def test_pins_beyond_the_limit_are_refused(control_plane: Make) -> None:
    """The longest request still runs beside them."""
    loop = PrefixLoop(control_plane(config(max_pinned_pages=10)))
    loop.run(prefix(1, SYSTEM), prefix(2, text(2, 24)))
    assert loop.said[1][-1] == "ready" and loop.said[2] == ["warming", "refused"]
    assert loop.refusals[2].is_full and "pin: " in loop.refusals[2].reason
    loop.run(prefix(3, text(3, 16)), prefix(4, text(4, 50), pin=False))
    assert loop.said[3][-1] == loop.said[4][-1] == "ready" and loop.num_pinned_pages == 10
    loop.run(prefix(5, text(5, 4)))
    assert loop.refusals[5].is_full
    loop.run(RemovePrefix(1))
    loop.run(prefix(6, text(6, 24)))
    assert loop.said[6][-1] == "ready" and loop.num_pinned_pages == 10
    fill(loop)


def test_a_prefix_that_cannot_be_cached_is_refused(control_plane: Make) -> None:
    loop = PrefixLoop(control_plane(config()))
    loop.run(prefix(1, text(1, PAGE - 1)), prefix(2, text(1, CONTEXT)), prefix(3, text(3, 8)))
    assert "at least 4" in loop.refusals[1].reason and f"at most {CONTEXT - 1}" in loop.refusals[2].reason
    assert not loop.refusals[1].is_full and not loop.refusals[2].is_full
    loop.run(prefix(3, text(3, 8)), prefix(3, text(4, 8)))
    assert loop.said[3] == ["warming", "ready", "ready", "refused"] and "another" in loop.refusals[3].reason
    assert loop.states()[3].is_ready
    loop.run(prefix(4, text(4, CONTEXT - 1), pin=False), prefix(5, text(5, CONTEXT - 1), pin=False))
    assert loop.said[5][-1] == "ready"
    loop.run(prefix(6, text(6, CONTEXT - 1), pin=False))
    assert loop.refusals[6].is_full and "room for 50" in loop.refusals[6].reason


def test_the_number_of_prefixes_is_limited(control_plane: Make) -> None:
    loop = PrefixLoop(control_plane(config()))
    for i in range(NUM_PAGES):
        loop.step(prefix(i, text(i, PAGE), pin=False))
    loop.run(prefix(NUM_PAGES, text(1, PAGE), pin=False))
    assert loop.refusals[NUM_PAGES].is_full and len(loop.states()) == NUM_PAGES < MAX_PREFIXES


def test_without_a_cache_prefixes_are_refused(control_plane: Make) -> None:
    plain = ControlPlaneConfig(NUM_PAGES, PAGE, 4, 16, CONTEXT, cache="naive")
    loop = PrefixLoop(control_plane(plain), keeps_prefixes=False)
    loop.run(prefix(1, SYSTEM), prefix(2, SYSTEM, pin=False))
    assert loop.said == {1: ["refused"], 2: ["refused"]} and "naive" in loop.refusals[1].reason


def test_clear_cache_empties_the_cache(control_plane: Make) -> None:
    """But for what is pinned, and what a request uses."""
    loop = PrefixLoop(control_plane(config()))
    loop.run(prefix(1, SYSTEM), prefix(2, text(2, 40), pin=False))
    loop.ask(text(3, 21))
    before = loop.loop.control_plane.stats()
    assert before.num_evictable_pages == 10 + 5
    loop.run(ClearCache())
    after = loop.loop.control_plane.stats()
    assert loop.cleared == [15] and after.num_free_pages == before.num_free_pages + 15
    assert loop.ask([*SYSTEM, 9]) == 24
    assert loop.ask([*text(2, 40), 9]) == 0
    live = loop.request(text(4, 40), max_tokens=30)
    loop.step(live)
    for _ in range(5):
        loop.step()
    loop.step(ClearCache())
    follower = loop.request([*text(4, 40), 7])
    loop.run(follower)
    assert loop.cached[follower.req_id] == 40
    loop.check_texts()


@pytest.mark.parametrize("failed", range(1, 9))
def test_a_failed_forward_costs_no_pin(control_plane: Make, failed: int) -> None:
    """Whenever it fails: while they are computed, afterwards, beside others."""
    loop = PrefixLoop(control_plane(config()), fail_steps=(failed,))
    loop.step(prefix(1, SYSTEM), prefix(2, text(2, 40), pin=False))
    loop.step()
    loop.step(loop.request(text(5, 30), max_tokens=10))
    loop.run()
    assert [states[-1] for states in loop.said.values()] == ["ready", "ready"]
    assert all(one.is_ready for one in loop.states().values()) and loop.num_pinned_pages == 6
    assert loop.ask([*SYSTEM, 9]) == 24
    assert loop.ask([*text(2, 40), 9]) == 40
    fill(loop)
    assert loop.ask([*SYSTEM, 9]) == 24


def test_a_second_failed_forward_computes_the_prefix_again(control_plane: Make) -> None:
    """In one step the end of its first try comes, and the next, empty one fails: that is told first."""
    loop = PrefixLoop(control_plane(config()), fail_steps=(0, 3))
    loop.step(prefix(1, SYSTEM[:8]))
    loop.step()
    loop.step(loop.request(text(5, 4), max_tokens=1))
    loop.step()
    assert loop.loop.prefixes.events and loop.loop._failed_step == 3
    loop.run()
    assert loop.said[1][-1] == "ready" and loop.num_pinned_pages == 2


def test_a_prefix_whose_forward_always_fails_is_given_up(control_plane: Make) -> None:
    loop = PrefixLoop(control_plane(config()), overlap=False, fail_steps=range(0, 200, 2))
    loop.run(prefix(1, text(1, 8)))
    assert loop.said[1] == ["warming", "failed"] and f"{MAX_TRIES} times" in loop.refusals[1].reason
    assert loop.states() == {} and loop.num_pinned_pages == 0
    loop.engine.fail_steps.clear()
    loop.run(prefix(1, text(1, 8)))
    assert loop.said[1][-1] == "ready"


@pytest.mark.parametrize("primary", ["python", "rust_hotpath"])
@pytest.mark.parametrize("call", ["schedule", "commit"])
@pytest.mark.parametrize("at", range(1, 10))
def test_a_broken_scheduler_costs_no_pin(primary: str, call: str, at: int) -> None:
    for when in ("before", "after"):
        plane = make_faulty(make_control_plane(primary, config()), f"{call}:{at}:{when}")
        loop = PrefixLoop(plane, fallback=lambda: make_control_plane("python", config()))
        loop.step(prefix(1, SYSTEM), prefix(2, text(2, 40), pin=False), prefix(3, text(3, 20)))
        loop.step(loop.request(text(5, 30), max_tokens=10))
        loop.step()
        loop.step(RemovePrefix(3), ClearCache(), AbortRequest(0))
        loop.run()
        for i in range(20):
            loop.ask(text(50 + i, 5))
        assert loop.loop.num_failovers == 1
        assert {i: states[-1] for i, states in loop.said.items()} == {1: "ready", 2: "ready", 3: "removed"}
        assert loop.num_pinned_pages == 6 and len(loop.cleared) == 1
        fill(loop)
        assert loop.ask([*SYSTEM, 9]) == 24


def test_unpinned_prefixes_are_subject_to_the_cache_budget(control_plane: Make) -> None:
    """What nobody uses is as much as was said, pins beside it."""
    loop = PrefixLoop(control_plane(config(cache_token_budget=40)))
    loop.run(prefix(1, SYSTEM), prefix(2, text(2, 20), pin=False))
    for i in range(8):
        loop.ask(text(50 + i, 25))
        loop.step()
        assert loop.loop.control_plane.stats().num_evictable_pages <= 10
    assert loop.ask([*SYSTEM, 9]) == 24
    assert loop.ask(text(57, 25)) == 24


def test_long_prompts_are_not_kept(control_plane: Make) -> None:
    loop = PrefixLoop(control_plane(config(cache_max_prompt=30)))
    loop.run(prefix(1, text(1, 40)))
    assert loop.ask([*text(1, 40), 9, 9, 9, 9, 9]) == 40, "a pin is kept as long as it is"
    loop.ask(text(2, 30))
    loop.ask(text(3, 31))
    assert loop.ask([*text(2, 30), 9]) == 28 and loop.ask([*text(3, 31), 9]) == 0


def test_without_prefixes_a_step_s_output_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = PrefixLoop(make_control_plane("python", config()))
    monkeypatch.setattr(Prefixes, "without_own_rows", lambda self, output: pytest.fail("nothing to look for"))
    loop.ask(SYSTEM)
    with pytest.raises(pytest.fail.Exception):
        loop.run(prefix(1, SYSTEM))


# -------------------------------------------------------------------------------------------------------------- random

WORDS = [text(first, length) for first, length in ((1, 26), (2, 40), (3, 8), (4, 99), (5, 4))]
PROMPTS = st.tuples(st.sampled_from(WORDS), st.integers(1, 60), st.integers(0, 3)).map(
    lambda one: [*one[0][: one[1]], *range(200, 201 + one[2])][: CONTEXT - 20]
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 7), st.sampled_from(WORDS), st.booleans()),
    st.tuples(st.just("remove"), st.integers(0, 7)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("ask"), PROMPTS, st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@pytest.mark.parametrize("primary", ["python", "rust_hotpath"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(ACTIONS, max_size=40),
    overlap=st.booleans(),
    failed=st.sets(st.integers(0, 60), max_size=3),
    order=st.none() | st.tuples(st.sampled_from(["schedule", "commit"]), st.integers(1, 60), st.booleans()),
    limits=st.tuples(st.sampled_from([0, 10, 39]), st.sampled_from([0, 40]), st.sampled_from([0, 30])),
)
def test_texts_do_not_depend_on_cache_orders(
    primary: str,
    actions: list[tuple[Any, ...]],
    overlap: bool,
    failed: set[int],
    order: tuple[str, int, bool] | None,
    limits: tuple[int, int, int],
) -> None:
    """Forwards fail and the scheduler breaks beside it. In the end ready prefixes hold what is pinned, nobody else."""
    settings_ = config(max_pinned_pages=limits[0], cache_token_budget=limits[1], cache_max_prompt=limits[2])
    plane = make_control_plane(primary, settings_)
    if order is not None:
        plane = make_faulty(plane, f"{order[0]}:{order[1]}:{'after' if order[2] else 'before'}")
    loop = PrefixLoop(
        plane, overlap=overlap, fail_steps=sorted(failed), fallback=lambda: make_control_plane("python", settings_)
    )
    asked = 0
    for action in actions:
        match action:
            case ("add", prefix_id, tokens, pin):
                loop.step(prefix(prefix_id, tokens, pin=pin))
            case ("remove", prefix_id):
                loop.step(RemovePrefix(prefix_id))
            case ("clear",):
                loop.step(ClearCache())
            case ("ask", prompt, max_tokens):
                loop.step(loop.request(prompt, max_tokens))
                asked += 1
            case ("abort", req_id) if req_id < asked:
                loop.step(AbortRequest(req_id))
            case ("step", count):
                for _ in range(count):
                    loop.step()
    loop.run()
    loop.check_texts()
    assert set(loop.reasons) == set(range(asked)), "each request has one end"
    assert all(one.is_ready for one in loop.states().values())
    assert len(loop.cleared) == sum(action[0] == "clear" for action in actions)
    pins = sum(one.num_tokens // PAGE for one in loop.states().values() if one.is_pinned)
    assert loop.num_pinned_pages <= pins <= limits[0] and (loop.num_pinned_pages > 0) == (pins > 0)
    stats = loop.loop.control_plane.stats()
    assert stats.num_held_pages == 0 and stats.num_protected_pages == loop.num_pinned_pages
    for state in loop.states().values():
        if state.is_pinned:
            tokens = loop.prefix_tokens(state.prefix_id)
            failovers, prompt = loop.loop.num_failovers, [*tokens, 251][: CONTEXT - 1]
            cached = loop.ask(prompt, 1)
            if loop.loop.num_failovers > failovers:  # the scheduler broke just now: all of it was computed again
                cached = loop.ask(prompt, 1)
            assert cached >= (len(tokens) - 1) // PAGE * PAGE
    loop.run(*(RemovePrefix(i) for i in range(8)))
    assert loop.num_pinned_pages == 0 and loop.loop.prefixes._root.children == {}
