"""Adapters on the engines that compute models: against transformers with merged weights, in mixed batches, in the
prefix cache."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.engine.api import Engine
from minisgl.message import LoadAdapter, UnloadAdapter
from minisgl.sampling_params import SamplingParams
from tests.helpers import models
from tests.helpers.adapters import ALL, TinyAdapter
from tests.helpers.engines import MODEL_ENGINES, Collector, assert_greedy, assert_logprobs, greedy, load

PROMPTS = [[5, 9, 23, 40, 41, 7], [11] * 9, list(range(30, 60)), [3, 4, 5]]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"targets": ALL},
    "attention": {"targets": ("q_proj", "v_proj"), "rank": 8, "alpha": 16.0},
    "rank stabilized": {"targets": ("o_proj", "down_proj", "gate_proj"), "rank": 5, "alpha": 2.0, "rslora": True},
}


@dataclass
class World:
    """A tiny model, the adapters 1, 2, ... of it, their folders, and the models that they make of it; 0: as it is."""

    folder: Path
    paths: dict[int, Path]
    references: dict[int, Any]


@pytest.fixture(scope="module", params=["qwen3-untied", "gemma3-tied"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of(request.param, tmp_path_factory.mktemp("adapters"), list(KINDS.values()))


def world_of(variant: str, place: Path, kinds: list[dict[str, Any]]) -> World:
    model = models.tiny_model(variant)
    folder = models.save(model, place / "model")
    found = World(folder, {}, {0: model})
    for number, settings in enumerate(kinds, 1):
        adapter = TinyAdapter(model, number, **settings)
        found.paths[number] = adapter.save(place / f"adapter-{number}")
        found.references[number] = adapter.merged(model)
    return found


def started(world: World, engine: Engine, config: EngineConfig) -> Collector:
    collector = Collector(engine, config)
    collector.loop.step([LoadAdapter(number, f"a{number}", str(path)) for number, path in world.paths.items()])
    assert collector.adapters == dict.fromkeys(world.paths, "loaded"), collector.reasons_of_adapters
    return collector


def with_adapter(sampling: SamplingParams, number: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, adapter=number)


@pytest.mark.parametrize("variant", ["phi3-window", "glm4", "starcoder2-window", "falcon-40b"])
def test_projections_by_other_names_are_adapted(variant: str, tmp_path: Path) -> None:
    """Fused ones, those whose rows lie in another order, and an MLP without a gate."""
    targets = (*ALL, "qkv_proj", "gate_up_proj", "c_fc", "c_proj", "query_key_value", "dense", "dense_h_to_4h")
    test_adapter_outputs_equal_merged_weights(world_of(variant, tmp_path, [{"targets": targets}]), "cpu")


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_adapter_outputs_equal_merged_weights(world: World, engine: str) -> None:
    """Log probabilities of what is generated, within 1e-4: prefill in chunks, decode."""
    made, config = load(engine, world.folder, max_prefill_length=16)
    collector = started(world, made, config)
    asks = SamplingParams(temperature=0, max_tokens=6, seed=0, logprobs=5)
    numbers = range(len(world.paths) + 1)
    collector.run({number: (PROMPTS[2], with_adapter(asks, number)) for number in numbers})
    made.close()
    for number in numbers:
        reference, tokens = world.references[number], collector.tokens[number]
        assert_greedy(reference, PROMPTS[2], tokens)
        assert_logprobs(reference, PROMPTS[2], tokens, collector.logprobs[number])
    assert len({tuple(tokens) for tokens in collector.tokens.values()}) == len(numbers), "each has its own text"


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_rows_of_a_mixed_batch_are_those_of_each_alone(world: World, engine: str) -> None:
    made, config = load(engine, world.folder)
    collector = started(world, made, config)
    requests = {
        10 * number + i: (prompt, with_adapter(greedy(8), number))
        for i, prompt in enumerate(PROMPTS)
        for number in world.references
    }
    collector.run(requests)
    made.close()
    for req_id, (prompt, sampling) in requests.items():
        assert_greedy(world.references[sampling.adapter], prompt, collector.tokens[req_id])


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_prefix_is_shared_only_within_an_adapter(world: World, engine: str) -> None:
    made, config = load(engine, world.folder)
    collector = started(world, made, config)
    prompt = [7] * 70
    for turn in range(2):
        collector.run({10 * turn + n: (prompt, with_adapter(greedy(4), n)) for n in (0, 1, 2)})
    made.close()
    page = config.page_size
    assert [collector.cached[n] for n in (0, 1, 2)] == [0, 0, 0]
    assert [collector.cached[10 + n] for n in (0, 1, 2)] == [69 // page * page] * 3
    for n in (0, 1, 2):
        assert collector.tokens[n] == collector.tokens[10 + n]
        assert_greedy(world.references[n], prompt, collector.tokens[n])


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_adapter_with_non_finite_values_is_refused(world: World, engine: str, tmp_path: Path) -> None:
    folder = shutil.copytree(world.paths[1], tmp_path / "broken")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    made, config = load(engine, world.folder)
    collector = started(world, made, config)
    collector.loop.step([LoadAdapter(9, "broken", str(folder))])
    assert collector.adapters[9] == "refused"
    assert collector.reasons_of_adapters[9] == f"adapter_model.safetensors: {name}: a value is not finite"
    made.close()


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_adapter_is_unloaded_after_its_last_request(world: World, engine: str) -> None:
    """And disturbs neither that nor others; another one may come under its name."""
    made, config = load(engine, world.folder)
    collector = started(world, made, config)
    long = with_adapter(greedy(20), 1)
    collector.add({1: (PROMPTS[0], long), 2: (PROMPTS[1], greedy(20))})
    collector.loop.step([])
    collector.loop.step([UnloadAdapter(1), LoadAdapter(9, "a1", str(world.paths[2]))])
    assert collector.adapters == {1: "unloaded", 2: "loaded", 3: "loaded", 9: "loaded"}
    collector.run({3: (PROMPTS[0], with_adapter(greedy(5), 9))})
    assert_greedy(world.references[1], PROMPTS[0], collector.tokens[1])
    assert_greedy(world.references[0], PROMPTS[1], collector.tokens[2])
    assert_greedy(world.references[2], PROMPTS[0], collector.tokens[3])
    assert (len(collector.tokens[1]), collector.errors) == (20, {})
    collector.run({4: (PROMPTS[0], long)})
    assert collector.errors == {4: "adapter 1 is not loaded"}
    made.close()
