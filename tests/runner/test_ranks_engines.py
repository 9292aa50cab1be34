"""Engines of several ranks behind one step loop: the texts of one rank, whatever the scheduler does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.distributed import ALONE, Group
from minisgl.engine.api import Engine
from minisgl.engine.echo import EchoEngine, EchoModel
from minisgl.engine.loading import load_engine
from minisgl.message import AbortRequest, AddRequest
from minisgl.runner.build import build_control_plane
from minisgl.runner.intake import Beside, LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.runner.rank_messages import decode, encode, make_buffers, pack, sizes_of, unpack
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.digest import plan_digest
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import FinishReason, StepBuffers, StepPlan
from tests.helpers.grammars import PERSON, matcher, of_regex, of_schema
from tests.helpers.grammars import compiler as grammar_compiler
from tests.helpers.models import assert_greedy, save, tiny_model
from tests.helpers.ranks import ThreadRanks
from tests.helpers.received import Received

PLANE = ControlPlaneConfig(40, 4, 8, 24, 150, (256,))
Tamper = Callable[[int, StepPlan, StepBuffers], None]
Request = tuple[list[int], SamplingParams]


def drive(
    engine: Engine,
    plane: ControlPlane,
    requests: Sequence[Request],
    *,
    aborts: Sequence[int] = (),
    compiler: Any = None,
    overlap: bool = True,
) -> tuple[Received, StepLoop]:
    """A few arrivals a step; those in `aborts` are aborted some steps later."""
    clients = Received()
    loop = StepLoop(
        plane,
        engine,
        clients.take,
        fallback=lambda: make_control_plane("python", PLANE),
        settings=LoopSettings(overlap=overlap),
        beside=Beside(compiler=compiler),
    )
    waiting = list(enumerate(requests))
    step = 0
    while waiting or not loop.idle:
        now, waiting = waiting[:3], waiting[3:]
        messages = [AddRequest(i, np.array(p, np.int32).tobytes(), params) for i, (p, params) in now]
        loop.step([*messages, *(AbortRequest(i) for i in aborts if step == i + 4)])
        loop.control_plane.check()
        step += 1
    return clients, loop


def echo_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        (
            [7] * rng.randrange(30) + [rng.randrange(5) for _ in range(rng.randint(1, 50))],
            SamplingParams(max_tokens=rng.randint(1, 40), seed=i, ignore_eos=rng.random() < 0.5),
        )
        for i in range(40)
    ]


def expected(request: Request) -> list[int]:
    prompt, params = request
    assert params.max_tokens is not None
    return EchoModel(seed=params.seed or 0).generate(prompt, params.max_tokens, ignore_eos=params.ignore_eos)


def echo_ranks(size: int, folder: Path, tamper: Tamper | None = None, fail: Sequence[int] = ()) -> ThreadRanks:
    def build(group: Group) -> Engine:
        engine = EchoEngine(
            num_pages=40,
            page_size=4,
            max_rows=8,
            max_seq_len=150,
            context_len=150,
            worker_thread=group.rank == 0,
            group=group,
        )
        engine.fail_steps.update(fail)
        return engine

    return ThreadRanks(size, folder, build, tamper)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_echo_texts_do_not_depend_on_the_ranks(
    size: int, tmp_path: Path, control_plane: Callable[[ControlPlaneConfig], ControlPlane]
) -> None:
    """Chunked prefill, prefix hits, retraction, aborts."""
    requests, aborts = echo_requests(size), (2, 9, 17, 30)
    engine = echo_ranks(size, tmp_path)
    clients, loop = drive(engine, control_plane(PLANE), requests, aborts=aborts)
    engine.close()
    assert not engine.errors
    assert loop.control_plane.stats().num_retracted_total > 0 and sum(clients.cached.values()) > 0
    for i, request in enumerate(requests):
        got, whole = clients.tokens.get(i, []), expected(request)
        if clients.reasons[i] is FinishReason.ABORT:
            assert i in aborts and got == whole[: len(got)]
        else:
            assert got == whole
    assert any(reason is FinishReason.ABORT for reason in clients.reasons.values())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_grammars_do_not_depend_on_the_ranks(size: int, tmp_path: Path) -> None:
    """Rank 0 alone knows them, in the middle of failed forwards and a failover, too."""
    grammars = of_schema(PERSON), None, of_regex("[a-c]{60,70}")
    requests = [
        (prompt, SamplingParams(max_tokens=70, seed=i, grammar=grammars[i % 3]))
        for i, (prompt, _) in enumerate(echo_requests(size))
    ]
    engine = echo_ranks(size, tmp_path, fail=(9,))
    plane = make_faulty(make_control_plane("rust_hotpath", PLANE), "commit:30:after")
    clients, loop = drive(engine, plane, requests, compiler=grammar_compiler())
    engine.close()
    assert not engine.errors and loop.num_failovers == 1
    failed = [i for i, reason in clients.reasons.items() if reason is FinishReason.ERROR]
    assert 0 < len(failed) <= 8
    for i, (prompt, params) in enumerate(requests):
        grammar = None if params.grammar is None else matcher(params.grammar)
        alone = EchoModel(seed=i).generate(prompt, min(70, 150 - len(prompt)), grammar=grammar)
        got = clients.tokens.get(i, [])
        assert got == (alone[: len(got)] if i in failed else alone)


def _wrong_page(rank: int, plan: StepPlan, buffers: StepBuffers) -> None:
    if rank == 1 and plan.step == 5 and plan.num_page_ids:
        buffers.ring[plan.ring_index].page_ids[0] ^= 1


def _wrong_token(rank: int, plan: StepPlan, buffers: StepBuffers) -> None:
    if rank == 1 and plan.step == 0:
        buffers.ring[plan.ring_index].input_ids[0] += 1


def _no_host_token(rank: int, plan: StepPlan, buffers: StepBuffers) -> None:
    """As if the rank had not heard which token its peer sampled."""
    ids = buffers.ring[plan.ring_index].input_ids
    ids[: plan.num_tokens][ids[: plan.num_tokens] < 0] = 0


@pytest.mark.parametrize("tamper", [_wrong_page, _wrong_token, _no_host_token])
def test_a_plan_that_is_wrong_on_one_rank_changes_texts(tamper: Tamper, tmp_path: Path) -> None:
    requests = echo_requests(1)
    engine = echo_ranks(2, tmp_path, tamper)
    clients, _ = drive(engine, make_control_plane("python", PLANE), requests)
    engine.close()
    assert any(clients.tokens[i] != expected(request) for i, request in enumerate(requests))


def test_a_failed_forward_fails_on_every_rank_and_all_go_on(tmp_path: Path) -> None:
    requests = echo_requests(3)
    engine = echo_ranks(3, tmp_path, fail=(4, 11))
    clients, _ = drive(engine, make_control_plane("python", PLANE), requests)
    engine.close()
    assert engine.failed_steps == [[4, 11], [4, 11]] and not engine.errors
    errors = {i for i, reason in clients.reasons.items() if reason is FinishReason.ERROR}
    assert 0 < len(errors) < len(requests)
    for i, request in enumerate(requests):
        assert i in errors or clients.tokens[i] == expected(request)


def test_a_failover_gives_the_ranks_new_buffers(tmp_path: Path) -> None:
    requests = echo_requests(4)
    engine = echo_ranks(2, tmp_path)
    plane = make_faulty(make_control_plane("python", PLANE), "commit:12:after")
    clients, loop = drive(engine, plane, requests)
    engine.close()
    assert loop.num_failovers == 1 and not engine.errors
    assert clients.tokens == {i: expected(request) for i, request in enumerate(requests)}


def test_without_a_fallback_the_error_gets_through(tmp_path: Path) -> None:
    engine = echo_ranks(2, tmp_path)
    loop = StepLoop(make_faulty(make_control_plane("python", PLANE), "schedule:1:before"), engine, lambda _: None)
    with pytest.raises(ControlPlaneError):
        for _ in range(3):
            loop.step([])
    engine.close()


def test_a_step_arrives_as_it_was_sent(control_plane: Callable[[ControlPlaneConfig], ControlPlane]) -> None:
    plane = control_plane(PLANE)
    sent: list[int] = []

    class Checking(EchoEngine):
        def launch(self, plan, buffers, bindings):  # type: ignore[no-untyped-def]
            copy = make_buffers(decode(encode(sizes_of(buffers))))  # type: ignore[arg-type]
            for entry in copy.ring:  # what is not sent must not matter
                for name in entry.__slots__:
                    getattr(entry, name).fill(-7)
            step = decode(encode(pack(plan, buffers, bindings)))
            again, bound = unpack(step, copy)  # type: ignore[arg-type]
            assert plan_digest(again, copy) == plan_digest(plan, buffers)
            for b, a in zip(bindings, bound, strict=True):
                assert (a.slot, a.req_id, a.sampling, a.num_prompt) == (b.slot, b.req_id, b.sampling, b.num_prompt)
                assert np.array_equal(a.tokens, b.tokens)
            sent.append(plan.num_assigned)
            return super().launch(again, copy, bound)

    engine = Checking(num_pages=40, page_size=4, max_rows=8, max_seq_len=150, context_len=150)
    requests = echo_requests(5)
    clients, _ = drive(engine, plane, requests)
    engine.close()
    assert sum(sent) >= len(requests)
    assert clients.tokens == {i: expected(request) for i, request in enumerate(requests)}


# ---------------------------------------------------------------------------------------------------------- torch


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Ranks share the cores: loading one of several lowers the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def torch_requests() -> list[Request]:
    rng = random.Random(8)
    greedy = SamplingParams(temperature=0, max_tokens=12, seed=0, logprobs=2)
    odd = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=10),
        SamplingParams(temperature=0, repetition_penalty=1.3, seed=0, max_tokens=10),
        SamplingParams(temperature=0, prompt_logprobs=1, seed=0, max_tokens=4),
    ]
    prompts = [[9] * rng.randrange(20) + [rng.randrange(100) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    return [(prompt, odd[i] if i < len(odd) else greedy) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("variant", "size"),
    [("llama-bias-untied", 2), ("qwen3-moe-not-everywhere", 2), ("qwen2-window-in-the-last-layers", 4)],
)
def test_the_torch_engine_of_several_ranks_says_what_one_says(variant: str, size: int, tmp_path: Path) -> None:
    """Greedy tokens, sampled ones, penalties and log probabilities, under pressure on the pool."""
    reference = tiny_model(variant, eos_token_id=None, bos_token_id=None)
    folder = save(reference, tmp_path / "model")
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        num_pages=40,
        page_size=4,
        max_prefill_length=24,
        max_running_requests=6,
        tp=size,
    )

    def build(group: Group) -> Engine:
        return load_engine(config, lambda *report: None, group)

    requests = torch_requests()
    found = []
    for engine in (build(ALONE), ThreadRanks(size, tmp_path, build)):
        found.append(drive(engine, build_control_plane(config, engine.info), requests)[0])
        engine.close()
    one, many = found
    assert many.reasons == one.reasons
    for i, (prompt, params) in enumerate(requests):
        if params.logprobs is not None:
            assert_greedy(reference, prompt, many.tokens[i])
        if many.tokens[i] == one.tokens[i]:  # a tie may fall either way, and what follows differs
            ours, theirs = ([own for own, *_ in each.logprobs.get(i, [])] for each in (many, one))
            assert ours == pytest.approx(theirs, abs=1e-3)
    assert sum(many.tokens[i] == one.tokens[i] for i in range(len(requests))) >= len(requests) - 1
    assert many.prompt_logprobs[2] == pytest.approx(one.prompt_logprobs[2], abs=1e-3)
