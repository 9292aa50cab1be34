"""Random scenarios for the torch engine on a late device, compared with one that runs each job when it is queued: the
same requests, steps and outputs.

A scenario has a model, sizes, requests with the steps at which they arrive and are aborted, steps whose results are
NaN, and the device's lateness. Both engines are driven by the real step loop; any difference is an `AssertionError`.

A scenario follows from its draws alone; models are shared, KV pools are not. Where rounding decides which token comes
next, the rest cannot be compared, and the scenario counts as a near tie.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from minisgl.attention import KVPool, TorchSdpa
from minisgl.config import EngineConfig
from minisgl.engine.api import EngineInfo
from minisgl.engine.device import Device, DeviceSampler, InlineDevice, Needs
from minisgl.engine.graphs import RunAgain
from minisgl.engine.torch_engine import TorchEngine
from minisgl.models.api import Attend
from minisgl.models.decoder import Decoder
from minisgl.runner.build import control_plane_config
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.device import LateDevice
from tests.helpers.engines import Collector, TimedRequest
from tests.helpers.grammars import PickyCompiler
from tests.helpers.models import load, save, tiny_model

VOCAB = 60
CONTEXT = 96
MODELS = ("qwen3-tied", "mistral-window", "qwen2-window-in-the-last-layers", "qwen3-moe")
CPU = torch.device("cpu")
ROUNDING = 1e-5  # bound on the difference of logits: ten times the observed one
Draw = Callable[[int, int], int]  # an integer between two, both included


@dataclass
class Scenario:
    model: str
    config: EngineConfig
    graphs: tuple[int, ...]
    eagerness: float
    seed: int  # of the device
    requests: list[TimedRequest] = field(default_factory=list)
    broken: frozenset[int] = frozenset()  # indices of forwards whose outputs are NaN


def make_scenario(draw: Draw) -> Scenario:
    page_size = (1, 4, 16)[draw(0, 2)]
    rows = draw(1, 6)
    config = EngineConfig(
        dtype="float32",
        page_size=page_size,
        num_pages=max(2, draw(24, 120) // page_size),
        max_running_requests=rows,
        max_prefill_length=(1, 5, 24, 200)[draw(0, 3)],
        cpu_backend=("python", "rust_hotpath")[draw(0, 1)],
        overlap=bool(draw(0, 3)),
    )
    graphs = ((), (rows,), (1, rows), (1, 2, 4, 6))[draw(0, 3)]
    scenario = Scenario(
        model=MODELS[draw(0, len(MODELS) - 1)],
        config=config,
        graphs=tuple(sorted({size for size in graphs if size <= rows})),
        eagerness=(0.0, 0.1, 0.4, 0.8)[draw(0, 3)],
        seed=draw(0, 1000),
    )
    shared = [draw(0, VOCAB - 1) for _ in range(draw(0, 20))]
    for req_id in range(1, draw(1, 9) + 1):
        prompt = shared[: draw(0, len(shared))] + [draw(0, VOCAB - 1) for _ in range(draw(1, 20))]
        arrives = (0, draw(0, 12))[draw(0, 1)]
        aborted = arrives + draw(0, 10) if draw(0, 5) == 0 else -1
        scenario.requests.append(TimedRequest(req_id, arrives, prompt, _sampling(draw), aborted))
    if draw(0, 5) == 0:
        scenario.broken = frozenset(draw(0, 30) for _ in range(draw(1, 2)))
    if rows > 1 and draw(0, 1):
        scenario.config = msgspec.structs.replace(config, speculative=f"ngram:{draw(1, rows - 1)}")
        first, number = scenario.requests[0], len(scenario.requests) + 1
        scenario.requests.append(replace(first, req_id=number, arrives=first.arrives + 30))  # the cache knows it
    return scenario


def _sampling(draw: Draw) -> SamplingParams:
    found = _without_grammar(draw)
    seed = found.seed or 0
    if seed % 3 == 1 or found.allowed_token_ids:
        return found
    return msgspec.structs.replace(found, grammar=str(seed % 1000))


def _without_grammar(draw: Draw) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(1, 25),
        temperature=(0.0, 0.8, 1.3)[draw(0, 2)],
        top_k=(-1, 5)[draw(0, 1)],
        top_p=(1.0, 0.8)[draw(0, 1)],
        min_p=(0.0, 0.05)[draw(0, 3) // 3],
        frequency_penalty=(0.0, 0.7)[draw(0, 3) // 3],
        repetition_penalty=(1.0, 1.3)[draw(0, 3) // 3],
        logit_bias={draw(0, VOCAB - 1): 2.0} if draw(0, 3) == 3 else {},
        allowed_token_ids=(1, 2, 5) if draw(0, 7) == 7 else (),
        bad_token_ids=((1, 2), (2, 2, 1), (draw(0, VOCAB - 1),)) if draw(0, 3) == 3 else (),
        seed=draw(0, 2**40),
        logprobs=2 if draw(0, 3) == 3 else None,
        prompt_logprobs=1 if draw(0, 7) == 7 else None,
    )


@cache
def model_of(variant: str, place: torch.device = CPU) -> Decoder:
    made = tiny_model(
        variant,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
        bos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        return load(save(made, Path(folder)), device=place)


def _pool(model: Decoder, config: EngineConfig, place: torch.device) -> KVPool:
    assert config.num_pages is not None
    with torch.inference_mode():
        return KVPool(
            model.attention,
            num_pages=config.num_pages,
            page_size=config.page_size,
            dtype=torch.float32,
            device=place,
        )


def _engine(scenario: Scenario, device: Device, place: torch.device = CPU) -> TorchEngine:
    model, config = model_of(scenario.model, place), scenario.config
    assert config.num_pages is not None
    info = EngineInfo(
        name="torch",
        model_dir="",
        vocab_size=VOCAB,
        context_len=CONTEXT,
        eos_ids=(),
        num_pages=config.num_pages,
        page_size=config.page_size,
        device=str(place),
        dtype="float32",
        graph_sizes=scenario.graphs,
    )
    pool = _pool(model, config, place)
    attention = TorchSdpa(pool, torch.float32, place, model.config.windows)
    limits = control_plane_config(config, info).limits()
    return TorchEngine(model, info, pool, attention, device, limits, capture=RunAgain)


class _Breaking:
    """Model forward that stores and returns NaN in the calls whose index is in `broken`."""

    def __init__(self, model: Decoder, broken: frozenset[int]) -> None:
        self._forward = model.forward
        self._broken = broken
        self.number = 0

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self.number += 1
        if self.number - 1 in self._broken:
            return self._forward(ids, positions, lambda layer, q, k, v: attend(layer, q, k, v * float("nan")))
        return self._forward(ids, positions, attend)


def drive(scenario: Scenario, engine: TorchEngine) -> Collector:
    """Run a scenario in the real step loop until all requests have ended."""
    overlap: Any = scenario.config.overlap
    collector = Collector(engine, scenario.config, overlap=overlap, compiler=PickyCompiler(VOCAB))
    forward = _Breaking(engine.model, scenario.broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model, "forward", forward)
        patch.setattr(engine, "forward_model", forward)
        collector.drive(scenario.requests)
        engine.close()
    return collector


class Choices:
    """Recorder of a sampler's inputs: logits and parameters by (seed, position)."""

    def __init__(self, engine: TorchEngine) -> None:
        self._drawn: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._sampler = engine.sampler
        self._sample = engine.sampler.sample
        engine.sampler.sample = self._record  # type: ignore[method-assign]

    def _record(self, logits: Tensor, slots: Tensor, position: Tensor, needs: Needs) -> Tensor:
        floats, ints = self._sampler._floats[slots], self._sampler._ints[slots]
        for i, place in enumerate(zip(ints[:, 1].tolist(), position.tolist(), strict=True)):
            self._drawn[place] = logits[i : i + 1].clone(), floats[i : i + 1], ints[i : i + 1]
        return self._sample(logits, slots, position, needs)

    def near_tie(self, scenario: Scenario, got: Collector, expected: Collector) -> bool:
        """Return true if the first differing token of some request is one that rounding could have chosen."""
        for request in scenario.requests:
            mine, others = (one.tokens.get(request.req_id, []) for one in (got, expected))
            first = next((i for i, pair in enumerate(zip(mine, others, strict=False)) if pair[0] != pair[1]), None)
            if first is None:
                continue
            assert request.sampling.seed is not None
            position = len(request.prompt) + first
            logits, floats, ints = self._drawn[request.sampling.seed, position]
            sampler, one = DeviceSampler(1, CPU), torch.zeros(1, dtype=torch.int64)
            sampler._floats, sampler._ints = floats, ints
            generator = torch.Generator().manual_seed(0)
            for _ in range(200):
                moved = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * 2 * ROUNDING
                needs = Needs(sampled=True, min_p=True, truncated=True)
                if int(sampler.sample(moved, one, torch.tensor([position]), needs)) == mine[first]:
                    return True
        return False


def same(got: Collector, expected: Collector, within: float = 1e-4) -> None:
    assert got.reasons == expected.reasons
    assert got.tokens == expected.tokens
    assert got.cached == expected.cached
    assert got.logprobs.keys() == expected.logprobs.keys()
    for req_id, steps in got.logprobs.items():
        for mine, other in zip(steps, expected.logprobs[req_id], strict=True):
            assert mine[0] == pytest.approx(other[0], abs=within)
            assert mine[2] == pytest.approx(other[2], abs=within)


def taken_along(got: Collector, expected: Collector) -> list[int]:
    """Return the requests that failed along with another's non-finite row: with torch's attention on a device, the step
    in flight may read a page before it is cleared (docs/architecture.md). Asserts that all others end as expected."""
    error = FinishReason.ERROR
    more = [req_id for req_id, reason in got.reasons.items() if reason is error is not expected.reasons[req_id]]
    if not (more and any("not finite" in text for text in expected.errors.values())):
        return []
    assert all("not finite" in got.errors[req_id] for req_id in more)
    others = got.reasons.keys() - more
    assert {i: got.reasons[i] for i in others} == {i: expected.reasons[i] for i in others}
    assert {i: got.tokens.get(i) for i in others} == {i: expected.tokens.get(i) for i in others}
    return more


def run_on(scenario: Scenario, device: Device, place: torch.device, within: float) -> None:
    """Run a scenario on any device and compare, without graphs: torch's attention cannot run in one."""
    scenario = replace(scenario, graphs=())
    expected, choices = _expected(scenario)
    got = drive(scenario, _engine(scenario, device, place))
    if not choices.near_tie(scenario, got, expected):
        same(got, expected, within)


def _expected(scenario: Scenario) -> tuple[Collector, Choices]:
    """Return the outcome of a scenario on a device where no job is late."""
    engine = _engine(scenario, InlineDevice())
    choices = Choices(engine)
    return drive(scenario, engine), choices


def run(scenario: Scenario, *, heed: bool = True) -> dict[str, int]:
    """Run a scenario on a late device and compare; return counts of what the scenario exercised."""
    expected, choices = _expected(replace(scenario, graphs=()))
    device = LateDevice(scenario.seed, eagerness=scenario.eagerness, heed=heed)
    engine = _engine(scenario, device)
    graphs: list[Any] = list(engine.graphs.values())
    got = drive(scenario, engine)
    if choices.near_tie(scenario, got, expected):
        return {"near ties": 1}
    if taken_along(got, expected):
        return {"spread": 1}
    same(got, expected)
    reasons = list(got.reasons.values())
    assert set(got.reasons) == {request.req_id for request in scenario.requests}
    masked = [request for request in scenario.requests if request.sampling.grammar is not None]
    for request in masked:
        assert PickyCompiler(VOCAB).follows(request.sampling.grammar or "", got.tokens.get(request.req_id, []))
    return {
        "retracted": got.plane.stats().num_retracted_total,
        "cached": sum(got.cached.values()),
        "aborted": reasons.count(FinishReason.ABORT),
        "failed": reasons.count(FinishReason.ERROR),
        "in graphs": sum(graph.count for graph in graphs),
        "masked": sum(len(got.tokens.get(request.req_id, [])) for request in masked),
        "drafted": got.plane.stats().num_drafted_total,
        "sampled": sum(r.sampling.temperature > 0 for r in scenario.requests),
    }
