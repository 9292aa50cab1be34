"""The torch engine: what a failed forward ends, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.step import FinishReason
from tests.helpers.engines import Collector, assert_greedy, greedy
from tests.helpers.models import save, tiny_model

pytestmark = pytest.mark.any_cpu

VOCAB = 120

Reference = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny random checkpoint and the model that transformers makes of it."""
    model = tiny_model(
        "qwen3-tied", vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=None, bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp("model")), model


def load(folder: Path, **settings: object) -> tuple[TorchEngine, EngineConfig]:
    config = EngineConfig(model=str(folder), dtype="float32", **settings)  # type: ignore[arg-type]
    return load_engine(config, lambda text, done=0, total=0: None), config


def test_a_forward_that_raises_ends_its_step_only(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=64)
    collector = Collector(engine, config)
    real, calls = engine.model.forward, iter(range(1000))

    def forward(*args: object) -> torch.Tensor:
        if next(calls) == 3:
            raise RuntimeError("out of luck")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model, "forward", forward)
    collector.run({0: ([1, 2, 3], greedy(20))})
    assert collector.reasons[0] is FinishReason.ERROR and len(collector.tokens[0]) < 20
    collector.run({1: ([1, 2, 3], greedy(20))})
    engine.close()
    assert collector.reasons[1] is FinishReason.LENGTH
    assert_greedy(model, [1, 2, 3], collector.tokens[1])


def test_numbers_that_are_not_finite_in_pages_leave_nothing(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=8, page_size=4)
    collector = Collector(engine, config)
    store, spoiled = engine.pool.store, iter([True])

    def spoil(layer: int, out_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        store(layer, out_loc, k, v * float("nan") if next(spoiled, False) else v)

    monkeypatch.setattr(engine.pool, "store", spoil)
    collector.run({0: ([1, 2, 3], greedy(5))})
    assert collector.reasons[0] is FinishReason.ERROR
    collector.run({1: ([1, 2, 3], greedy(10))})  # the same pages again, partly filled
    engine.close()
    assert_greedy(model, [1, 2, 3], collector.tokens[1])
