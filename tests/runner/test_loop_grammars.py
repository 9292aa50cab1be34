"""Requests with a grammar through the step loop on the echo engine: texts are those of each request alone, whatever
else happens to it, and what cannot be compiled is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE, EchoEngine, EchoModel
from minisgl.grammar.compiler import Compiled, GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.message import GRAMMAR_REFUSED, AbortRequest, AddRequest, FinishRequest, ToEngine
from minisgl.runner.intake import Beside, LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import FinishReason
from tests.helpers.grammars import PERSON, PickyCompiler, PickyMatcher, compiler, matcher, of_regex, of_schema, text
from tests.helpers.received import Received

CONFIG = ControlPlaneConfig(52, 4, 8, 24, 200, (256,))
NUM_REQUESTS = 40
GRAMMARS = (of_schema(PERSON), of_regex("[a-c]{100,120}"), None, of_regex("(yes|no|perhaps){1,9}"))
Request = tuple[int, list[int], SamplingParams]


def requests(seed: int, count: int = NUM_REQUESTS) -> list[Request]:
    """(step of arrival, prompt, sampling): with and without a grammar, shared prefixes; more than fit at once."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        prompt = [7] * rng.randrange(20) + [rng.randrange(5) for _ in range(rng.randint(1, 40))]
        grammar = GRAMMARS[i % len(GRAMMARS)]
        found.append(
            (rng.randrange(30), prompt, SamplingParams(max_tokens=rng.randint(20, 120), seed=i, grammar=grammar))
        )
    return found


def add(req_id: int, prompt: list[int], sampling: SamplingParams) -> AddRequest:
    return AddRequest(req_id, np.array(prompt, np.int32).tobytes(), sampling)


def engine() -> EchoEngine:
    return EchoEngine(num_pages=52, page_size=4, max_rows=8, max_seq_len=200, context_len=200, worker_thread=False)


def drive(
    plan: list[Request],
    plane: str,
    *,
    overlap: bool,
    order: str = "",
    fail_steps: Sequence[int] = (),
    ends: bool = False,
) -> tuple[Received, StepLoop]:
    made = engine()
    made.fail_steps.update(fail_steps)
    clients = Received()
    inner = make_control_plane(plane, CONFIG)
    loop = StepLoop(
        make_faulty(inner, order) if order else inner,
        made,
        clients.take,
        fallback=lambda: make_control_plane("python", CONFIG),
        settings=LoopSettings(overlap=overlap),
        beside=Beside(compiler=compiler()),
    )
    rng = random.Random(5)
    step = 0
    while step <= 30 or not loop.idle:
        messages: list[ToEngine] = [add(i, prompt, one) for i, (at, prompt, one) in enumerate(plan) if at == step]
        if ends and step % 9 == 5:  # some are told to end
            told = rng.randrange(len(plan))
            if plan[told][0] < step:
                messages.append(AbortRequest(told) if told % 2 else FinishRequest(told))
        loop.step(messages)
        step += 1
        assert step < 5000
    made.close()
    return clients, loop


_alone: dict[str, list[int]] = {}


def alone(request: Request, seed: int) -> list[int]:
    _, prompt, sampling = request
    if (key := f"{seed} {request}") not in _alone:
        grammar = None if sampling.grammar is None else matcher(sampling.grammar)
        most = min(sampling.max_tokens or 0, 200 - len(prompt))
        _alone[key] = EchoModel(seed=seed).generate(prompt, most, grammar=grammar)
    return _alone[key]


def check(clients: Received, plan: list[Request], *, fails: bool = False) -> int:
    """Each stream is that of the request alone, or the beginning of it if it was told to end; how many are objects."""
    assert set(clients.reasons) == set(range(len(plan)))
    assert fails or FinishReason.ERROR not in clients.reasons.values()
    objects = 0
    for req_id, request in enumerate(plan):
        expected, got, reason = alone(request, req_id), clients.tokens.get(req_id, []), clients.reasons[req_id]
        whole = reason in (FinishReason.STOP, FinishReason.LENGTH) and len(got) == len(expected)
        assert got == expected if whole else got == expected[: len(got)], (req_id, text(got), text(expected))
        if whole and reason is FinishReason.STOP and request[2].grammar == GRAMMARS[0]:
            jsonschema.validate(json.loads(text(got)), PERSON)
            objects += 1
    return objects


@pytest.mark.parametrize("plane", ["python", "rust_hotpath"])
@pytest.mark.parametrize("overlap", [True, False])
def test_each_text_is_that_of_its_request_alone(plane: str, overlap: bool) -> None:
    plan = requests(1)
    clients, loop = drive(plan, plane, overlap=overlap)
    assert check(clients, plan) >= 3
    assert loop.control_plane.stats().num_retracted_total > 0
    assert set(clients.reasons.values()) <= {FinishReason.STOP, FinishReason.LENGTH}


def test_a_grammar_that_cannot_be_compiled_is_refused_and_no_other() -> None:
    plan = [(0, [1, 2], SamplingParams(max_tokens=9, seed=0, grammar=one)) for one in ("start: /(/", GRAMMARS[1])]
    clients, _ = drive(plan, "python", overlap=True)
    assert clients.reasons[0] is FinishReason.ERROR and clients.errors[0].startswith(GRAMMAR_REFUSED)
    assert "unclosed" in clients.errors[0] or "invalid regex" in clients.errors[0]
    assert clients.tokens.get(0) is None and clients.tokens[1] == alone(plan[1], 0)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("order", ["schedule:7:before", "schedule:19:after", "commit:11:before", "commit:30:after"])
def test_a_failover_in_the_middle_of_objects_changes_nothing(order: str, overlap: bool) -> None:
    plan = requests(2)
    clients, loop = drive(plan, "rust_hotpath", overlap=overlap, order=order)
    assert loop.num_failovers == 1
    assert check(clients, plan) >= 3
    assert not clients.errors


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_forward_takes_only_its_own_rows(overlap: bool) -> None:
    plan = requests(3)
    clients, _ = drive(plan, "rust_hotpath", overlap=overlap, fail_steps=[6, 25])
    check(clients, plan, fails=True)
    failed = [i for i, reason in clients.reasons.items() if reason is FinishReason.ERROR]
    assert 0 < len(failed) <= 16 and all("forward of step" in clients.errors[i] for i in failed)


def test_those_that_are_told_to_end_are_forgotten() -> None:
    plan = requests(4)
    clients, _ = drive(plan, "rust_hotpath", overlap=True, ends=True)
    check(clients, plan)
    assert FinishReason.ABORT in clients.reasons.values()


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from(
        ["", "schedule:1:after", "schedule:9:before", "commit:2:after", "commit:8:before", "commit:20:after"]
    ),
    st.lists(st.integers(2, 60), max_size=2),
    st.booleans(),
)
def test_whatever_happens_texts_are_those_of_requests_alone(
    seed: int, overlap: bool, order: str, fail_steps: list[int], ends: bool
) -> None:
    plan = requests(seed, 16)
    clients, _ = drive(plan, "python", overlap=overlap, order=order, fail_steps=fail_steps, ends=ends)
    check(clients, plan, fails=bool(fail_steps))


def test_several_choices_of_one_prompt_have_matchers_of_their_own() -> None:
    """Those of `n`: same prompt and grammar, other seeds."""
    sampling = [SamplingParams(max_tokens=80, seed=i, grammar=GRAMMARS[0]) for i in range(8)]
    clients, _ = drive([(0, [1, 2, 3], one) for one in sampling], "rust_hotpath", overlap=True)
    texts = [clients.tokens[i] for i in range(8)]
    assert texts == [alone((0, [1, 2, 3], one), i) for i, one in enumerate(sampling)]
    assert len(set(map(tuple, texts))) == 8


def test_a_matcher_that_fails_ends_its_own_request_and_no_other() -> None:
    clients = Received()
    made = EchoEngine(
        num_pages=60, page_size=4, max_rows=8, max_seq_len=200, context_len=200, vocab_size=300, worker_thread=False
    )
    config = ControlPlaneConfig(60, 4, 8, 24, 200, (256,))
    picky: Any = PickyCompiler(300, (256,))
    loop = StepLoop(make_control_plane("rust_hotpath", config), made, clients.take, beside=Beside(compiler=picky))
    grammars = ("8 5", "8", "8 0", None)
    loop.step([add(i, [3, 4], SamplingParams(max_tokens=30, seed=5, grammar=one)) for i, one in enumerate(grammars)])
    while not loop.idle:
        loop.step([])
        loop.control_plane.check()
    assert clients.errors == {0: "it was poisoned", 2: "it was poisoned"}
    assert clients.tokens[0] == clients.tokens[1][:5] and 2 not in clients.tokens
    model = EchoModel(seed=5)
    assert clients.tokens[1] == model.generate([3, 4], 30, grammar=PickyMatcher(8, 300, (256,)), vocab_size=300)
    assert clients.tokens[3] == model.generate([3, 4], 30)


@pytest.mark.parametrize("plane", ["python", "rust_hotpath"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("order", ["", "schedule:19:after", "commit:30:after"])
def test_a_row_whose_mask_takes_long_waits_alone(plane: str, overlap: bool, order: str) -> None:
    """It leaves the scheduler until its mask is there; its text and those of all others are the same."""
    rng, clients = random.Random(7), Received()
    made = EchoEngine(
        num_pages=60, page_size=4, max_rows=8, max_seq_len=200, context_len=200, vocab_size=300, worker_thread=False
    )
    config = ControlPlaneConfig(60, 4, 8, 24, 200, (256,))
    picky: Any = PickyCompiler(300, (256,), slow_one_in=3)
    inner = make_control_plane(plane, config)
    loop = StepLoop(
        make_faulty(inner, order) if order else inner,
        made,
        clients.take,
        fallback=lambda: make_control_plane("python", config),
        settings=LoopSettings(overlap=overlap),
        beside=Beside(compiler=picky),
    )
    asked = {
        i: ([3] * rng.randrange(9) + [rng.randrange(5)], SamplingParams(max_tokens=40, seed=i, grammar=grammar))
        for i, grammar in enumerate(["8", "9", None, "10"] * 5)
    }
    told = set[int]()
    for step in range(1000):
        messages: list[ToEngine] = [add(i, *one) for i, one in asked.items() if i == step // 2 and step % 2 == 0]
        if step % 12 == 11 and step // 4 in asked:  # wherever it may be
            told.add(step // 4)
            messages.append(AbortRequest(step // 4) if step % 2 else FinishRequest(step // 4))
        loop.step(messages)
        loop.control_plane.check()
        if step > 45 and loop.idle:
            break
    assert picky.num_prepared > 20 and not clients.errors and set(clients.reasons) == set(asked)
    assert loop.num_failovers == bool(order)
    counted = loop.admitted
    assert 0 < counted.num_prompt_tokens <= sum(len(prompt) for prompt, _ in asked.values()), "each prompt once"
    assert counted.num_hits + counted.num_misses <= len(asked)
    for req_id, (prompt, sampling) in asked.items():
        grammar = None if sampling.grammar is None else PickyMatcher(int(sampling.grammar), 300, (256,))
        expected = EchoModel(seed=req_id).generate(prompt, 40, grammar=grammar, vocab_size=300)
        got = clients.tokens.get(req_id, [])
        assert got == (expected[: len(got)] if req_id in told else expected), req_id


class _Slow:
    """A compiler whose grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.inner, self.held = compiler(), True

    def submit(self, key: int, grammar: str) -> None:
        self.inner.submit(key, grammar)

    def prepare(self, key: int, matcher: Matcher) -> None:  # on a busy machine a mask may be late
        self.inner.prepare(key, matcher)

    def cancel(self, key: int) -> None:
        self.inner.cancel(key)

    def take(self) -> list[Compiled]:
        return [] if self.held else self.inner.take()


def test_requests_wait_outside_of_the_scheduler_until_they_are_compiled() -> None:
    slow: Any = _Slow()
    clients, plane, made = Received(), make_control_plane("rust_hotpath", CONFIG), engine()
    loop = StepLoop(plane, made, clients.take, beside=Beside(compiler=slow))
    sampling = SamplingParams(max_tokens=40, seed=0, grammar=GRAMMARS[0])
    loop.step([add(i, [1, 2], sampling) for i in range(4)] + [add(4, [1, 2], SamplingParams(max_tokens=5, seed=4))])
    while not loop.is_resting:
        loop.step([])
    assert not loop.idle and clients.reasons.keys() == {4}
    loop.step([AbortRequest(1), FinishRequest(2), AbortRequest(99)])
    assert clients.reasons == {1: FinishReason.ABORT, 2: FinishReason.STOP, 4: clients.reasons[4]}
    assert loop.is_resting and plane.stats().num_live == 0
    slow.held = False
    while not loop.idle:
        loop.step([])
    for req_id in (0, 3):
        assert clients.tokens[req_id] == alone((0, [1, 2], sampling), 0)
    assert {1, 2}.isdisjoint(clients.tokens)


def test_an_engine_without_a_compiler_refuses_grammars() -> None:
    clients, made = Received(), engine()
    loop = StepLoop(make_control_plane("python", CONFIG), made, clients.take)
    loop.step([add(0, [1], SamplingParams(max_tokens=4, seed=0, grammar=GRAMMARS[1]))])
    assert clients.errors[0].startswith(GRAMMAR_REFUSED) and loop.idle


def test_a_request_of_a_lost_engine_goes_on_in_its_object() -> None:
    """What the pool sends to another engine: prompt and what was generated."""
    sampling = SamplingParams(max_tokens=60, seed=3, grammar=GRAMMARS[0])
    whole = alone((0, [9, 8, 7], sampling), 3)
    for cut in (1, 5, len(whole) - 1):
        clients, made = Received(), engine()
        loop = StepLoop(
            make_control_plane("rust_hotpath", CONFIG), made, clients.take, beside=Beside(compiler=compiler())
        )
        tokens = np.array([9, 8, 7, *whole[:cut]], np.int32).tobytes()
        loop.step([AddRequest(0, tokens, sampling, num_generated=cut)])
        while not loop.idle:
            loop.step([])
        assert whole[:cut] + clients.tokens[0] == whole


def test_waiting_for_a_grammar_does_not_turn() -> None:
    """For the loop in a caller's own thread: a step for the request, one when it is compiled."""
    clients, made = Received(), engine()
    threaded = GrammarCompiler(None, VOCAB_SIZE, (EOS_ID,))
    loop = StepLoop(make_control_plane("python", CONFIG), made, clients.take, beside=Beside(compiler=threaded))
    loop.step([add(0, [1], SamplingParams(max_tokens=4, seed=0, grammar=GRAMMARS[1]))])
    loop.wait_for_grammar()
    loop.step([])
    assert loop.control_plane.stats().num_live == 1
    loop.wait_for_grammar()  # nothing to wait for
    while not loop.idle:
        loop.step([])
    threaded.close()
    assert len(clients.tokens[0]) == 4
