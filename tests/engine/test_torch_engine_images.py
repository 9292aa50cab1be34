"""Images in the torch engine: log probabilities as transformers computes them, in every way to compute a prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from minisgl.attention.torch_sdpa import TorchSdpa
from minisgl.config import ConfigError
from minisgl.engine import torch_sight
from minisgl.engine.graphs import RunAgain
from minisgl.engine.torch_engine import TorchEngine
from minisgl.engine.torch_sight import TorchSight, TorchTower
from minisgl.prompt_image import PromptImage
from tests.engine.test_cpu_engine_images import LONG, PROMPTS, Answer, finish, request
from tests.helpers.engines import Collector, load
from tests.helpers.models import LOGITS_WITHIN
from tests.helpers.vision import prompt_of, random_image, saved, seer, their_logits

DEVICES = ("cpu", "inline")  # inline: without a thread of the engine, as on a CUDA device


@pytest.fixture(scope="module")
def model() -> Any:
    return seer()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("seer"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def collector(folder: Path, **settings: Any) -> Collector:
    engine, config = load("torch", folder, **{"num_pages": 200, "page_size": 4, **settings})
    return Collector(engine, config)


def counts(one: Collector) -> torch_sight.ImageCounts:
    assert isinstance(one.engine, TorchEngine)
    return one.engine.image_counts()


def check(model: Any, prompt: tuple[Any, tuple[PromptImage, ...]], answer: Answer, name: str = "") -> None:
    """Compare the tokens and log probabilities of a greedy answer with those of transformers."""
    ids, images = prompt
    theirs = their_logits(model, np.array([*ids, *answer.tokens], np.int32), images)[len(ids) - 1 : -1].log_softmax(-1)
    assert theirs.argmax(-1).tolist() == answer.tokens, name
    ours = [own for own, _, _ in answer.logprobs]
    assert ours == pytest.approx(theirs.max(-1).values.tolist(), abs=LOGITS_WITHIN), name


def test_answers_are_those_of_transformers(model: Any, folder: Path, device: str) -> None:
    one = collector(folder, device=device)
    assert one.engine.info.sees
    prompts = [prompt_of(parts, seed=i) for i, parts in enumerate(PROMPTS.values())]
    together = finish(one, [request(i, prompt) for i, prompt in enumerate(prompts)])
    for i, (prompt, name) in enumerate(zip(prompts, PROMPTS, strict=True)):
        check(model, prompt, together[i], name)
    distinct = {image.digest for _, images in prompts for image in images}
    assert counts(one).num_runs == len(distinct)
    one.close()


@pytest.mark.parametrize("chunk", [1, 5, 17])
def test_chunks_may_end_within_an_image(model: Any, folder: Path, device: str, chunk: int) -> None:
    one = collector(folder, device=device, max_prefill_length=chunk)
    check(model, LONG, finish(one, [request(0, LONG)])[0])
    assert counts(one).num_runs == 2
    one.close()


def test_chunks_of_one_token_run_as_graphs_after_the_images_alone(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchSdpa, "graph_obstacle", "")
    one = collector(folder, device="inline", max_prefill_length=1, page_size=1, num_pages=800, cuda_graph_max_bs=2)
    assert isinstance(one.engine, TorchEngine)
    graphs = [graph for graph in one.engine.graphs.values() if isinstance(graph, RunAgain)]
    before = sum(graph.count for graph in graphs)
    check(model, LONG, finish(one, [request(0, LONG)])[0])
    assert sum(graph.count for graph in graphs) > before
    one.close()


def test_a_cached_image_runs_no_tower(model: Any, folder: Path, device: str) -> None:
    one = collector(folder, device=device)
    cold, warm = (finish(one, [request(i, LONG)])[i] for i in range(2))
    check(model, LONG, warm)
    assert warm.cached >= len(LONG[0]) - 4 and cold.tokens == warm.tokens
    assert counts(one).num_runs == 2
    one.close()


def test_retracted_requests_go_on(model: Any, folder: Path) -> None:
    prompts = [prompt_of([3 + i, random_image(6, 4, seed=i), 4], seed=i) for i in range(8)]
    small = collector(folder, num_pages=24, max_seq_len=90, cpu_backend="python")
    small.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output: rows are retracted
    found = finish(small, [request(i, prompt, max_tokens=30) for i, prompt in enumerate(prompts)])
    assert small.plane.stats().num_retracted_total > 0
    for i, prompt in enumerate(prompts):
        check(model, prompt, found[i])
    small.close()


def test_evicted_features_are_computed_again(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sight, "CACHE_BYTES", 0)
    one = collector(folder, max_prefill_length=5, cache="naive")
    for i in range(2):
        check(model, LONG, finish(one, [request(i, LONG)])[i])
    assert counts(one).num_runs == 4 and counts(one).num_bytes == 0, "slots hold features between the chunks"
    one.close()


def test_counters_are_read_while_towers_run() -> None:
    class Tower:
        def features(self, image: PromptImage) -> torch.Tensor:
            return torch.zeros(1)

    sight = TorchSight(cast(TorchTower, Tower()), 1, torch.device("cpu"))
    images = [PromptImage(i.to_bytes(32, "big"), 0, 1, (2, 2), b"") for i in range(20_000)]
    with ThreadPoolExecutor(1) as pool:
        towers = pool.submit(lambda: [sight.features_of(image) for image in images])
        while not towers.done():
            assert sight.counts().num_images <= len(images)
        towers.result()
    assert sight.counts()[::2] == (len(images), len(images))


def test_penalties_do_not_count_images(folder: Path) -> None:
    one = collector(folder)
    assert finish(one, [request(0, LONG, repetition_penalty=1.3, presence_penalty=0.5)])[0].tokens
    one.close()


def test_a_tower_that_fails_ends_its_request_alone(model: Any, folder: Path, device: str) -> None:
    one, other = collector(folder, device=device), prompt_of([20], seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchTower, "features", _fail)
        found = finish(one, [request(0, LONG), request(1, other)])
    assert 0 not in found and "not finite" in one.errors[0]
    check(model, other, found[1])
    check(model, LONG, finish(one, [request(2, LONG)])[2])
    one.close()


def _fail(tower: TorchTower, image: PromptImage) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory")


def test_a_folder_without_all_tensors_of_the_tower_is_refused(model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved(model, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: tensor for name, tensor in tensors.items() if "merger.norm.bias" not in name}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the vision tower: .*merger.norm.bias"):
        load("torch", tmp_path)
