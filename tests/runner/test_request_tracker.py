"""What the step loop remembers of its requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from minisgl.engine.echo import EchoEngine, EchoModel
from minisgl.message import AbortRequest, AddRequest, FinishRequest, ToEngine
from minisgl.prompt_image import PromptImage
from minisgl.runner import request_tracker
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.runner.request_tracker import RequestTracker, UncommittedStep, errors_of, take_tokens
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import FinishReason, StepBuffers, StepLimits, StepPlan, step_output
from tests.helpers.received import Received

SAMPLING = SamplingParams(max_tokens=9, seed=1, stop_token_ids=(7,), min_tokens=2, ignore_eos=True)
GOES_ON, ENDS = FinishReason.NONE, FinishReason.LENGTH


def tracker(*req_ids: int) -> RequestTracker:
    found = RequestTracker()
    for req_id in req_ids:
        found.add(req_id, SAMPLING, np.array([10 * req_id, 10 * req_id + 1], np.int32), 2, priority=req_id)
        found.get(req_id).admitted = True
    return found


def test_a_request_is_its_prompt_and_what_it_generated() -> None:
    requests = tracker(1, 2)
    requests.record(step_output(0, [(2, 5, GOES_ON, 0), (1, 6, GOES_ON, 1)]))
    requests.record(step_output(1, [(1, 7, GOES_ON, 0)]))
    assert requests.get(1).tokens.tolist() == [10, 11, 6, 7]
    assert [request.tokens.tolist() for request in requests.live()] == [[10, 11, 6, 7], [20, 21, 5]]


def test_what_has_ended_is_forgotten_at_the_next_flush() -> None:
    requests = tracker(1, 2)
    image = PromptImage(b"", 0, 1, (2, 2), b"pixels")
    for req_id in (1, 2):
        requests.get(req_id).images = (image,)
    requests.record(step_output(0, [(1, 5, ENDS, 0), (2, 6, GOES_ON, 1)]))
    ended, other = requests.peek(1), requests.peek(2)
    assert ended is not None and ended.images == () and other is not None and other.images == (image,)
    requests.flush()
    assert 1 not in requests and requests.peek(1) is None
    assert [request.req_id for request in requests.live()] == [2]


def test_a_request_that_was_not_admitted_needs_no_flush() -> None:
    requests = tracker(1)
    requests.record(step_output(0, [(1, 5, GOES_ON, 0)]))
    new = requests.add(2, SAMPLING, np.array([3], np.int32), 1)
    assert requests.get(2) is new
    peeked = requests.peek(1)
    assert peeked is not None and peeked.tokens.tolist() == [10, 11]


def test_many_pending_outputs_are_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracker, "MAX_PENDING", 2)
    requests = tracker(1)
    for step in range(2):
        requests.record(step_output(step, [(1, step, GOES_ON, 0)]))
    peeked = requests.peek(1)
    assert peeked is not None and peeked.tokens.tolist() == [10, 11, 0, 1]


def test_an_arrival_is_the_request_with_what_it_has_generated() -> None:
    requests = tracker(3)
    assert requests.get(3).arrival().num_generated == 0
    requests.record(step_output(0, [(3, 5, GOES_ON, 0)]))
    event = requests.get(3).arrival()
    assert (event.req_id, event.tokens.tolist(), event.num_prompt, event.num_generated) == (3, [30, 31, 5], 2, 1)
    assert (event.max_tokens, event.min_tokens, event.stop_ids) == (9, 2, (7,))
    assert event.ignore_eos and event.priority == 3 and not event.no_match


ROW, WAITING, RUNNING, FORGOTTEN, WELL = range(5)


def test_each_request_has_its_own_reason() -> None:
    """What is said of its row, of a prompt that never got one, else of the step; nothing of who ended well."""
    requests = RequestTracker()
    for req_id in (ROW, WAITING, RUNNING, WELL):
        requests.add(req_id, SamplingParams(max_tokens=9), np.array([5, 6, 7], np.int32), 3)
        requests.get(req_id).admitted = req_id != WAITING
    failed = [(req_id, -1, FinishReason.ERROR, -1) for req_id in (ROW, WAITING, RUNNING, FORGOTTEN)]
    output = step_output(0, [*failed, (WELL, 5, FinishReason.STOP, 0)])
    assert errors_of(output, requests, {ROW: "no such row"}, "the step broke", 3) == {
        ROW: "no such row",
        WAITING: "a prompt of 3 tokens does not fit: the limit is 2",
        RUNNING: "the step broke",
        FORGOTTEN: "the step broke",
    }


CONFIG = ControlPlaneConfig(96, 4, 8, 24, 200, (256,))
DRAFTING = replace(CONFIG, max_draft_len=5)
NUM_REQUESTS = 64
LATER = 60  # steps


def requests(seed: int, again: bool = False) -> list[tuple[int, list[int], SamplingParams]]:
    """(step of arrival, prompt, sampling): shared prefixes, mixed lengths; more than fit at once. `again`: the second
    half is the first once more, so that the cache knows how its texts go on."""
    rng = random.Random(seed)
    found = []
    for i in range(NUM_REQUESTS):
        prompt = [7] * rng.randrange(20) + [rng.randrange(5) for _ in range(rng.randint(1, 40))]
        max_tokens = rng.randint(1, 50)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=i,
            min_tokens=min(max_tokens, rng.choice((0, 0, 3))),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(32,) if rng.random() < 0.2 else (),
        )
        found.append((rng.randrange(30), prompt, sampling))
    if again:
        half = found[: NUM_REQUESTS // 2]
        return half + [(at + LATER, prompt, sampling) for at, prompt, sampling in half]
    return found


def drive(
    order: str | None,
    primary: str | ControlPlane,
    seed: int,
    *,
    overlap: bool,
    fail_steps: Sequence[int] = (),
    config: ControlPlaneConfig = CONFIG,
    broken: int | None = None,
) -> tuple[Received, StepLoop]:
    engine = EchoEngine(num_pages=96, page_size=4, max_rows=8, max_seq_len=200, context_len=200, worker_thread=False)
    engine.fail_steps.update(fail_steps)
    if broken is not None:
        engine.broken_adapters = {0: broken}
    plane = make_control_plane(primary, config) if isinstance(primary, str) else primary
    clients = Received()
    loop = StepLoop(
        plane if order is None else make_faulty(plane, order),
        engine,
        clients.take,
        fallback=lambda: make_control_plane("python", config),
        settings=LoopSettings(overlap=overlap),
    )
    plan = requests(seed, config is DRAFTING)
    rng = random.Random(seed + 1)
    step = 0
    while step <= 30 + LATER or not loop.idle:
        messages: list[ToEngine] = []
        for req_id, (at, prompt, sampling) in enumerate(plan):
            if at == step:
                messages.append(AddRequest(req_id, np.array(prompt, np.int32).tobytes(), sampling, req_id % 2))
        if step % 9 == 5:  # some are told to end
            told = rng.randrange(NUM_REQUESTS)
            if plan[told][0] < step:
                messages.append(AbortRequest(told) if told % 2 else FinishRequest(told))
        loop.step(messages)
        step += 1
        assert step < 5000
    engine.close()
    return clients, loop


def check(clients: Received, seed: int, failed: bool = False, again: bool = False) -> None:
    """Each stream is that of the request alone, or the beginning of it if it was told to end."""
    assert set(clients.reasons) == set(range(NUM_REQUESTS))
    for req_id, (_, prompt, sampling) in enumerate(requests(seed, again)):
        alone = EchoModel(seed=sampling.seed or 0).generate(
            prompt,
            min(sampling.max_tokens or 0, 200 - len(prompt)),
            stop_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
        )
        got, reason = clients.tokens.get(req_id, []), clients.reasons[req_id]
        whole = reason in (FinishReason.STOP, FinishReason.LENGTH) and len(got) == len(alone)
        assert got == alone if whole else got == alone[: len(got)], (req_id, got, alone)
        if not whole:
            told = reason is FinishReason.ABORT if req_id % 2 else reason is FinishReason.STOP
            assert told or (failed and reason is FinishReason.ERROR), (req_id, reason, got, alone)


@pytest.mark.parametrize("primary", ["python", "rust_hotpath"])
@pytest.mark.parametrize("overlap", [True, False])
def test_no_stream_notices_a_failover(primary: str, overlap: bool) -> None:
    """Seeded steps; every fault happens, and afterwards the pages add up."""
    rng = random.Random(f"{primary} {overlap}")
    for seed in range(8):
        order = f"{rng.choice(('schedule', 'commit'))}:{rng.randrange(1, 120)}:{rng.choice(('before', 'after'))}"
        clients, loop = drive(order, primary, seed, overlap=overlap)
        try:
            check(clients, seed)
            assert loop.num_failovers == 1 and "on order" in loop.failover_reason
            plane = loop.control_plane
            plane.check()
            stats = plane.stats()
            assert stats.num_live == stats.num_held_pages == stats.num_draining == 0
            assert stats.num_free_pages + stats.num_evictable_pages == 96
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {order}: {error}") from error


@pytest.mark.parametrize("primary", ["python", "rust_hotpath"])
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_in_flight_are_taken_as_the_scheduler_would_have(primary: str, overlap: bool) -> None:
    """Whatever step it breaks at, texts are those without drafts."""
    accepted = 0
    for seed in range(8):
        rng = random.Random(f"{primary} {overlap} {seed}")
        order = f"commit:{rng.randrange(80, 150)}:before"
        clients, loop = drive(order, primary, seed, overlap=overlap, config=DRAFTING)
        check(clients, seed, again=True)
        assert loop.num_failovers == 1
        accepted += loop.control_plane.stats().num_accepted_total
    assert accepted > 20


@pytest.mark.parametrize("seed", range(5))
def test_a_failed_forward_beside_a_broken_control_plane(seed: int) -> None:
    """The forward of step 20 fails, and the scheduler breaks when it is told, or around it."""
    for order in (
        "schedule:21:before",
        "schedule:22:before",
        "schedule:22:after",
        "commit:19:after",
        "schedule:20:after",
    ):
        clients, loop = drive(order, "python", seed, overlap=seed % 2 == 0, fail_steps=(20,))
        check(clients, seed, failed=True)
        assert loop.num_failovers == 1


def test_a_failed_forward_with_drafts_ends_each_request_once() -> None:
    """A request has several rows in a step with its drafts."""
    limits, requests = StepLimits(max_rows=8, max_tokens=64, page_size=4, num_pages=96, max_seq_len=200), tracker(1, 2)
    entry = StepBuffers(limits).ring[0]
    entry.req_slots[:4] = 0, 5, 0, 0
    step = UncommittedStep(StepPlan(num_rows=4), entry, None)
    output = take_tokens(step, {0: 1, 5: 2}, requests, limits, (), {})
    assert output.req_ids.tolist() == [1, 2] and set(output.reasons.tolist()) == {FinishReason.ERROR}


@pytest.mark.parametrize("primary", ["python", "rust_hotpath"])
@pytest.mark.parametrize("order", [None, "commit:9:before", "commit:70:before", "schedule:30:after"])
def test_rows_that_are_not_finite_end_alone(primary: str, order: str | None) -> None:
    """From position 45 on; drafts are among them, and rows of requests that were told to end, and of prefills."""
    for seed, (config, overlap) in enumerate(product((CONFIG, DRAFTING), (True, False))):
        clients, loop = drive(order, primary, seed, overlap=overlap, config=config, broken=45)
        check(clients, seed, failed=True, again=config is DRAFTING)
        failed = 0
        for req_id, (_, prompt, _) in enumerate(requests(seed, config is DRAFTING)):
            num_inputs = len(prompt) + len(clients.tokens.get(req_id, [])) - 1
            assert num_inputs <= 45 or req_id not in clients.tokens, "a token was made of what is no numbers"
            if clients.reasons[req_id] is FinishReason.ERROR:
                failed += 1
                assert num_inputs == 45 or len(prompt) > 45
        assert failed > 10 and loop.num_failovers == (order is not None)
        stats = loop.control_plane.stats()
        assert stats.num_free_pages + stats.num_evictable_pages == 96


def test_without_another_control_plane_the_loop_ends() -> None:
    engine = EchoEngine(num_pages=96, page_size=4, max_rows=8, max_seq_len=200, context_len=200, worker_thread=False)
    plane = make_faulty(make_control_plane("python", CONFIG), "schedule:3:before")
    loop = StepLoop(plane, engine, lambda messages: None)
    with pytest.raises(ControlPlaneError, match="on order"):
        for _ in range(5):
            loop.step([])


def test_ends_and_budgets_survive_a_failover() -> None:
    for order in ("commit", "commit:x:after", "commit:4:later", "check:4:after"):
        with pytest.raises(ValueError, match="commit:40:after"):
            make_faulty(make_control_plane("python", CONFIG), order)
