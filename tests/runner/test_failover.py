"""The scheduler breaks at any step, before or after a call took effect: no stream notices, nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from minisgl.engine.echo import EchoEngine, EchoModel
from minisgl.message import AbortRequest, AddRequest, FinishRequest, FromEngine, StepTokens, ToEngine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.faulty import make_faulty
from minisgl.step import FinishReason

CONFIG = ControlPlaneConfig(96, 4, 8, 24, 200, (256,))
DRAFTING = replace(CONFIG, max_draft_len=5)
NUM_REQUESTS = 64
LATER = 60  # steps


class Clients:
    """What each request was sent, by id."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}

    def take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            assert isinstance(message, StepTokens)
            columns = (
                np.frombuffer(message.req_ids, np.int64).tolist(),
                np.frombuffer(message.tokens, np.int32).tolist(),
                np.frombuffer(message.reasons, np.int32).tolist(),
            )
            for req_id, token, reason in zip(*columns, strict=True):
                assert req_id not in self.reasons, f"request {req_id} was told something after its end"
                if token >= 0:
                    self.tokens.setdefault(req_id, []).append(token)
                if reason:
                    self.reasons[req_id] = FinishReason(reason)


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
) -> tuple[Clients, StepLoop]:
    engine = EchoEngine(num_pages=96, page_size=4, max_rows=8, max_seq_len=200, context_len=200, worker_thread=False)
    engine.fail_steps.update(fail_steps)
    plane = make_control_plane(primary, config) if isinstance(primary, str) else primary
    clients = Clients()
    loop = StepLoop(
        plane if order is None else make_faulty(plane, order),
        engine,
        clients.take,
        overlap=overlap,
        fallback=lambda: make_control_plane("python", config),
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


def check(clients: Clients, seed: int, failed: bool = False, again: bool = False) -> None:
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
def test_no_stream_notices(primary: str, overlap: bool) -> None:
    """20 seeded steps each; every fault happens, and afterwards the pages add up."""
    rng = random.Random(f"{primary} {overlap}")
    for seed in range(20):
        order = f"{rng.choice(('schedule', 'commit'))}:{rng.randrange(1, 120)}:{rng.choice(('before', 'after'))}"
        clients, loop = drive(order, primary, seed, overlap=overlap)
        try:
            check(clients, seed)
            assert loop.num_failovers == 1 and "on order" in loop.failover_reason
            plane = loop._control_plane
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


def test_without_another_control_plane_the_loop_ends() -> None:
    engine = EchoEngine(num_pages=96, page_size=4, max_rows=8, max_seq_len=200, context_len=200, worker_thread=False)
    plane = make_faulty(make_control_plane("python", CONFIG), "schedule:3:before")
    loop = StepLoop(plane, engine, lambda messages: None)
    with pytest.raises(ControlPlaneError, match="on order"):
        for _ in range(5):
            loop.step([])


def test_orders_are_checked() -> None:
    for order in ("commit", "commit:x:after", "commit:4:later", "check:4:after"):
        with pytest.raises(ValueError, match="commit:40:after"):
            make_faulty(make_control_plane("python", CONFIG), order)
