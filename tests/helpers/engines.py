"""Engines that compute models on this machine, for tests that run with each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl import _rust
from minisgl.config import EngineConfig
from minisgl.engine.api import Engine
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.message import AbortRequest, AdapterChanged, AddRequest, FromEngine
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.drafting import Proposer
from minisgl.runner.intake import Beside, LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from tests.helpers.received import Received

HAS_CPU = hasattr(_rust, "CpuEngine")
NEEDS_CPU = pytest.mark.skipif(not HAS_CPU, reason="the extension has no CPU engine")
CPU = pytest.param("cpu", marks=NEEDS_CPU)
MODEL_ENGINES = (pytest.param("torch", marks=pytest.mark.wide), CPU)
"""Arguments of `parametrize`: the engines that compute models."""


def load(engine: str, folder: Path, **settings: object) -> tuple[Engine, EngineConfig]:
    """Load an engine, in float32 as far as it can; return it with its configuration."""
    plain = {"kv_dtype": "f32"} if engine == "cpu" else {"dtype": "float32"}
    config = EngineConfig(model=str(folder), engine=engine, **{**plain, **settings})  # type: ignore[arg-type]
    return build_engine(config, lambda text, done=0, total=0: None), config


@dataclass
class TimedRequest:
    """Request that arrives before step `arrives`, and is aborted before step `aborted` (-1: never)."""

    req_id: int
    arrives: int
    prompt: list[int]
    sampling: SamplingParams
    aborted: int = -1


class Collector(Received):
    """Runs requests through the step loop and collects their outputs. With `wakes`, no helper of the loop blocks it,
    such as a vision tower."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        *,
        overlap: bool = True,
        compiler: GrammarCompiler | None = None,
        guesses: Proposer | None = None,
        wakes: bool = False,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.plane = build_control_plane(config, engine.info)
        self.loop = StepLoop(
            self.plane,
            engine,
            self.deliver,
            settings=LoopSettings(overlap=overlap),
            beside=Beside(compiler=compiler, guesses=guesses, wake=(lambda: None) if wakes else None),
        )
        self.adapters: dict[int, str] = {}
        self.reasons_of_adapters: dict[int, str] = {}

    def deliver(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, AdapterChanged):
                self.adapters[message.adapter] = message.state
                self.reasons_of_adapters[message.adapter] = message.reason
            else:
                self.take([message])

    def close(self) -> None:
        self.engine.close()

    def forget(self) -> None:
        """Discard the outputs of ended requests, here and in the loop."""
        for outputs in (self.tokens, self.reasons, self.cached, self.logprobs):
            outputs.clear()
        self.loop._requests.flush()

    def add(self, requests: dict[int, tuple[list[int], SamplingParams]]) -> None:
        adds = [AddRequest(i, np.array(p, np.int32).tobytes(), params) for i, (p, params) in requests.items()]
        self.loop.step(adds)

    def run(self, requests: dict[int, tuple[list[int], SamplingParams]]) -> None:
        self.add(requests)
        while not self.loop.idle:
            self.loop.step([])
            self.plane.check()

    def drive(self, requests: Sequence[TimedRequest]) -> None:
        """Run the loop until all requests have ended, each arriving and aborted at its step."""
        step, last = 0, max(max(one.arrives, one.aborted) for one in requests)
        while step <= last or not self.loop.idle:
            adds = [
                AddRequest(one.req_id, np.array(one.prompt, np.int32).tobytes(), one.sampling)
                for one in requests
                if one.arrives == step
            ]
            self.loop.step([*adds, *(AbortRequest(one.req_id) for one in requests if one.aborted == step)])
            self.plane.check()
            step += 1
            assert step < 3000, "it does not end"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)


def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Assert that each token has the reference's largest logit, or one within 1e-3 of it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, tokens, strict=True):
        assert float(row.max() - row[token]) <= 1e-3, "not a greedy token of the reference"


def assert_logprobs(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    logprobs: Sequence[tuple[float, tuple[int, ...], tuple[float, ...]]],
) -> None:
    """Assert that the log probabilities of each token and of the likeliest ones are the reference's, within 1e-4."""
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, token, (own, top_ids, top) in zip(rows, tokens, logprobs, strict=True):
        assert own == pytest.approx(float(row[token]), abs=1e-4)
        assert list(top) == pytest.approx(row[list(top_ids)].tolist(), abs=1e-4)
        assert list(top) == pytest.approx(row.topk(len(top)).values.tolist(), abs=1e-4)


def vectors(folder: Path, asked: Sequence[tuple[list[int], str]], **settings: object) -> list[torch.Tensor]:
    """Return the CPU engine's embeddings of prompts, each with its pooling."""
    engine, config = load("cpu", folder, **{"num_pages": 400, "num_threads": 1, **settings})
    collector = Collector(engine, config)
    params = [SamplingParams(max_tokens=1, temperature=0, seed=0, embedding=pooling) for _, pooling in asked]
    collector.run({i: (prompt, sampling) for i, ((prompt, _), sampling) in enumerate(zip(asked, params, strict=True))})
    collector.close()
    assert collector.errors == {}
    return [torch.from_numpy(np.frombuffer(collector.embeddings[i], np.float32).copy()) for i in range(len(asked))]
