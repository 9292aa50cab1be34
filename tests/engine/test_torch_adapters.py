"""Adapters of the torch engine beyond one device: ranks that each hold a part of A or of B, and the engine for CUDA
devices, on simulated ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.api import Engine
from minisgl.engine.loading import load_engine
from minisgl.message import LoadAdapter
from tests.helpers import models
from tests.helpers.adapters import TinyAdapter
from tests.helpers.engines import Collector, assert_greedy, greedy
from tests.helpers.ranks import ThreadRanks
from tests.helpers.tp import SETTINGS, cuda_rank
from tests.helpers.variants import VARIANTS

PROMPTS = [[5, 9, 23, 40, 41, 7], [11] * 19, list(range(30, 60)), [3, 4, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases, fewer KV heads than ranks, and two adapters of it."""
    place = tmp_path_factory.mktemp("adapters")
    model = models.tiny_model("llama-bias-untied")
    models.save(model, place / "model")
    for number in (1, 2):
        TinyAdapter(model, number, rank=2 + number).save(place / str(number))
    return place


def references() -> dict[int, Any]:
    model = models.tiny_model("llama-bias-untied")
    return {0: model} | {n: TinyAdapter(model, n, rank=2 + n).merged(model) for n in (1, 2)}


def check(engine: Engine, config: EngineConfig, folder: Path) -> None:
    collector = Collector(engine, config)
    collector.loop.step([LoadAdapter(n, str(n), str(folder / str(n))) for n in (1, 2)])
    assert collector.adapters == {1: "loaded", 2: "loaded"}, collector.reasons_of_adapters
    requests = {
        10 * number + i: (prompt, msgspec.structs.replace(greedy(7), adapter=number))
        for i, prompt in enumerate(PROMPTS)
        for number in (0, 1, 2)
    }
    collector.run(requests)
    engine.close()
    wanted = references()
    for req_id, (prompt, sampling) in requests.items():
        assert len(collector.tokens[req_id]) == 7
        assert_greedy(wanted[sampling.adapter], prompt, collector.tokens[req_id])


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_holds_its_shard_of_adapters(folder: Path, tmp_path: Path, size: int) -> None:
    config = EngineConfig(model=str(folder / "model"), engine="torch", dtype="float32", device="cpu", num_pages=64)
    engine = ThreadRanks(size, tmp_path, lambda group: load_engine(config, lambda *_: None, group))
    check(engine, config, folder)
    assert not engine.errors


@pytest.mark.parametrize(("kind", "graphs"), [("inline", ()), ("inline", (1, 2, 4, 8)), ("late", (1, 2, 4, 8))])
def test_a_step_with_adapters_runs_beside_graphs(folder: Path, kind: str, graphs: tuple[int, ...]) -> None:
    """Graphs know none, so they have only steps without."""
    config = EngineConfig(model=str(folder / "model"), dtype="float32", **{**SETTINGS, "num_pages": 200})
    engine = cuda_rank(folder / "model", kind=kind, graphs=graphs, num_pages=200)
    check(engine, config, folder)
    assert all(graph.count == 0 for graph in engine.captured) or not graphs  # type: ignore[attr-defined]


def test_model_without_adapter_is_unchanged(folder: Path) -> None:
    """Bit for bit, before an adapter comes, while it is there and unused, and in a step beside it."""
    config = EngineConfig(model=str(folder / "model"), engine="torch", dtype="float32", device="cpu", cache="naive")
    engine = load_engine(config, lambda *_: None)
    collector = Collector(engine, config)
    asks = msgspec.structs.replace(greedy(5), logprobs=3)
    collector.run({0: (PROMPTS[0], asks)})
    collector.loop.step([LoadAdapter(1, "1", str(folder / "1"))])
    collector.run({1: (PROMPTS[0], asks)})
    assert collector.logprobs[1] == collector.logprobs[0]
    collector.run({2: (PROMPTS[0], asks), 3: (PROMPTS[0], msgspec.structs.replace(asks, adapter=1))})
    assert collector.tokens[2] == collector.tokens[0] != collector.tokens[3]
    engine.close()


def _with(**config: object) -> Callable[[Path], object]:
    def save(folder: Path) -> object:
        return TinyAdapter(models.tiny_model("llama-bias-untied"), 1).save(folder, **config)

    return save


def _of(variant: str, *targets: str) -> Callable[[Path], object]:
    def save(folder: Path) -> object:
        return TinyAdapter(models.tiny_model(variant), 1, targets=targets).save(folder)

    return save


@pytest.mark.parametrize(
    ("save", "model", "reason"),
    [
        (_with(use_dora=True), "llama-bias-untied", "adapter_config.json: use_dora: true: DoRA is not supported"),
        (_with(bias="all"), "llama-bias-untied", 'bias: "all": biases are not supported'),
        (_with(modules_to_save=["lm_head"]), "llama-bias-untied", 'modules_to_save: \\["lm_head"\\]'),
        (_with(peft_type="IA3"), "llama-bias-untied", "peft_type: 'IA3': only LORA"),
        (_with(lora_alpha="x"), "llama-bias-untied", "lora_alpha: x: must be a number"),
        (
            _of("llama-bias-untied", "lm_head"),
            "llama-bias-untied",
            "lm_head.lora_A.weight: .*embeddings and of the head",
        ),
        (_of("llama3-tied", "q_proj"), "qwen3-tied", r"q_proj.lora_A.weight: is for a layer of 64 x 64 .* 64 x 96"),
        (_of("llama-bias-untied", "up_proj"), "moe", "mlp.up_proj.lora_A.weight: adapters of routed experts"),
    ],
)
def test_unsupported_input_is_refused_by_name(
    save: Callable[[Path], object], model: str, reason: str, tmp_path: Path
) -> None:
    save(tmp_path / "adapter")
    variant = next(name for name in VARIANTS if "moe" in name) if model == "moe" else model
    config = EngineConfig(
        model=str(models.save(models.tiny_model(variant), tmp_path / "model")), engine="torch", dtype="float32"
    )
    engine = load_engine(config, lambda *_: None)
    collector = Collector(engine, config)
    collector.loop.step([LoadAdapter(1, "a", str(tmp_path / "adapter"))])
    engine.close()
    assert collector.adapters == {1: "refused"}
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(collector.reasons_of_adapters[1])


def test_16_bit_adapter_weights_are_read(folder: Path, tmp_path: Path) -> None:
    from minisgl.weights.adapter import load_adapter

    adapter = TinyAdapter(models.tiny_model("llama-bias-untied"), 5)
    for dtype in (torch.float16, torch.bfloat16):
        found = load_adapter(adapter.save(tmp_path / str(dtype), dtype=dtype)).read()
        assert found.keys() == adapter.pairs.keys()
        for name, (a, b) in adapter.pairs.items():
            assert torch.equal(torch.from_numpy(found[name][0]), a.to(dtype).float())
            assert torch.equal(torch.from_numpy(found[name][1]), b.to(dtype).float() * adapter.scale)
