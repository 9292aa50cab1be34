"""Requests with grammars on the torch engine: on a device that is as late as orders allow it gives the same tokens,
all of which their grammars allow; what a mask costs, only they pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.engine.device import DeviceMasks, InlineDevice
from minisgl.grammar.slots import TokenMasks
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.engine.test_torch_engine import GRAPHS, VOCAB, build, load, requests
from tests.helpers.device import LateDevice
from tests.helpers.engines import Collector
from tests.helpers.grammars import PickyCompiler
from tests.helpers.models import save, tiny_model
from tests.helpers.tp import SETTINGS, break_forward

EOS = (3, 5)
Requests = dict[int, tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(
        "qwen3-tied", vocab_size=VOCAB, max_position_embeddings=256, eos_token_id=list(EOS), bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp("grammars"))


def with_grammars(wanted: Requests, every: int = 2) -> Requests:
    """The same requests, some with a grammar; those last longer."""

    def changed(req_id: int, sampling: SamplingParams) -> SamplingParams:
        if req_id % every:
            return sampling
        return msgspec.structs.replace(sampling, grammar=str(req_id), allowed_token_ids=(), max_tokens=40)

    return {req_id: (prompt, changed(req_id, sampling)) for req_id, (prompt, sampling) in wanted.items()}


def served(engine: Any, config: Any, wanted: Requests, *, overlap: bool = True, retracts: bool = False) -> Collector:
    collector = Collector(engine, config, overlap=overlap, compiler=PickyCompiler(VOCAB, EOS))
    if retracts:
        collector.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output
    try:
        collector.run(wanted)
    finally:
        engine.close()
    return collector


def check(got: Collector, expected: Collector, wanted: Requests) -> None:
    assert got.reasons == expected.reasons and got.errors == expected.errors
    assert got.tokens == expected.tokens
    for req_id, (_, sampling) in wanted.items():
        if sampling.grammar is not None and got.reasons[req_id] is not FinishReason.ERROR:
            assert PickyCompiler(VOCAB, EOS).follows(sampling.grammar, got.tokens[req_id])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("graphs", [(), GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("retracts", [False, True])
def test_delayed_device_gives_the_same_tokens(folder: Path, seed: int, graphs: tuple[int, ...], retracts: bool) -> None:
    wanted = with_grammars(requests(seed), every=1 if retracts else 2)
    settings = {**SETTINGS, "cpu_backend": "python"} | ({"num_pages": 18} if retracts else {})
    in_a_thread, config = load(folder, **settings)
    expected = served(in_a_thread, config, wanted, retracts=retracts)
    engine, config, captured = build(folder, LateDevice(seed, eagerness=(0.0, 0.3, 0.8)[seed % 3]), graphs, **settings)
    got = served(engine, config, wanted, retracts=retracts)
    check(got, expected, wanted)
    assert (got.plane.stats().num_retracted_total > 0) == retracts
    assert any(graph.count for graph in captured) == bool(graphs)
    assert FinishReason.STOP in got.reasons.values()


def test_overlap_changes_nothing(folder: Path) -> None:
    wanted = with_grammars(requests(11), every=1)
    collected = []
    for overlap in (True, False):
        engine, config, _ = build(folder, LateDevice(3), GRAPHS)
        collected.append(served(engine, config, wanted, overlap=overlap))
    check(*collected, wanted)


def test_rows_beside_a_grammar_keep_their_tokens(folder: Path) -> None:
    plain = requests(4)
    both = with_grammars(plain)
    found = []
    for wanted in (plain, both):
        engine, config, _ = build(folder, LateDevice(1), GRAPHS)
        found.append(served(engine, config, wanted))
    for req_id in (req_id for req_id in plain if req_id % 2):
        assert found[0].tokens[req_id] == found[1].tokens[req_id]
        assert found[0].logprobs.get(req_id) == found[1].logprobs.get(req_id)


class _Logged:
    """A matcher that writes down when it is told of a token."""

    def __init__(self, inner: Any, log: list[str]) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        if name in ("consume", "try_fill"):
            self._log.append(name)
        return getattr(self._inner, name)


def test_the_forward_does_not_wait_for_the_token_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its sampling does: the device has something to do while the host makes masks."""
    device, log = InlineDevice(), list[str]()
    run = device.forward.run

    def logged(name: str, job: Any) -> None:
        log.append(name)
        run(name, job)

    monkeypatch.setattr(device.forward, "run", logged)
    engine, config, _ = build(folder, device)
    compiler = PickyCompiler(VOCAB, EOS, lambda matcher: _Logged(matcher, log))
    collector = Collector(engine, config, compiler=compiler)
    sampling = SamplingParams(temperature=0, max_tokens=9, seed=0, grammar="4")
    collector.run({1: ([1, 2, 7], sampling)})
    engine.close()
    order = [name for name in log if name in ("forward", "consume", "try_fill", "sample")]
    step = ["forward", "consume", "try_fill", "sample"]
    num_tokens = len(collector.tokens[1])
    assert order[:3] == ["forward", "try_fill", "sample"] and num_tokens >= 3
    assert order[3 : 3 + 4 * (num_tokens - 1)] == step * (num_tokens - 1)


def test_steps_without_grammars_are_unchanged(folder: Path) -> None:
    device = LateDevice(5)
    engine, config, _ = build(folder, device, GRAPHS)
    served(engine, config, requests(5))
    assert "copy masks" not in device.log


def test_a_grammar_that_fails_ends_its_own_request(folder: Path) -> None:
    wanted = with_grammars(requests(6), every=1)
    wanted[3] = wanted[3][0], msgspec.structs.replace(wanted[3][1], grammar=f"{wanted[4][1].grammar} 4")
    engine, config, _ = build(folder, LateDevice(6), GRAPHS)
    got = served(engine, config, wanted)
    assert got.errors == {3: "it was poisoned"} and got.reasons[3] is FinishReason.ERROR
    assert len(got.tokens[3]) == 4
    others = {req_id: one for req_id, one in wanted.items() if req_id != 3}
    engine, config, _ = build(folder, LateDevice(6), GRAPHS)
    expected = served(engine, config, others)
    assert {req_id: tokens for req_id, tokens in got.tokens.items() if req_id != 3} == expected.tokens


@pytest.mark.parametrize("at", [3, 4, 5, 9])
def test_a_step_that_fails_takes_only_its_own_rows(folder: Path, at: int) -> None:
    wanted = with_grammars(requests(8), every=1)
    in_a_thread, config = load(folder, **SETTINGS)
    expected = served(in_a_thread, config, wanted)
    engine, config, _ = build(folder, LateDevice(at))
    break_forward(engine, at, lambda hidden: hidden * float("nan"))
    got = served(engine, config, wanted)
    failed = [req_id for req_id, reason in got.reasons.items() if reason is FinishReason.ERROR]
    assert failed and all("not finite" in got.errors[req_id] for req_id in failed)
    for req_id, tokens in expected.tokens.items():
        mine = got.tokens.get(req_id, [])
        assert mine == (tokens[: len(mine)] if req_id in failed else tokens)


def test_mask_keeps_allowed_logits_only() -> None:
    masks = DeviceMasks(InlineDevice(), torch.device("cpu"), 70, 4, 2)
    bits = np.array([[0, -1, 3], [5, 0, 0]], np.int32)
    apply = masks.copy_in(1, TokenMasks(np.array([0, 2], np.int32), bits))
    logits = torch.zeros(3, 70)
    apply(logits)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert allowed == [list(range(32, 66)), list(range(70)), [0, 2]]


class _Ops(TorchDispatchMode):
    """What writes to the device at once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_write = not func.is_view and func is not torch.ops.aten.empty.memory_format
        if is_write and isinstance(result, torch.Tensor) and result.is_meta:
            self.found.append(str(func))
        return result


def test_masks_are_written_in_streams_of_the_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own stream is in no order with them: a buffer that is filled there may be wiped after the first copy."""
    device, jobs = InlineDevice(), list[Any]()
    monkeypatch.setattr(device.copy_in, "run", lambda name, job: jobs.append(job))
    masks = DeviceMasks(device, torch.device("meta"), 70, 4, 2)
    with _Ops() as ops:
        masks.copy_in(1, TokenMasks(np.array([0], np.int32), np.zeros((1, 3), np.int32)))
        assert not ops.found
        (job,) = jobs
        job()
        assert ops.found == ["aten.copy_.default"]
