"""Embeddings on the engines that have them, against transformers: whole, in chunks, in a crowd, retracted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl.sampling_params import POOLINGS, SamplingParams
from tests.helpers.engines import Collector, greedy, load
from tests.helpers.models import save, tiny_model

pytestmark = pytest.mark.any_cpu

WITHIN = 2e-4
Reference = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=["qwen3-tied", "llama-bias-untied", "qwen3-moe-window"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = tiny_model(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


def asks(pooling: str) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0, seed=0, embedding=pooling)


def expected(model: PreTrainedModel, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    return {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]


def embedded(collector: Collector, req_id: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(collector.embeddings[req_id], np.float32).copy())


@pytest.mark.parametrize("chunk", [7, 8192])
def test_embeddings_equal_those_of_transformers(engine_name: str, reference: Reference, chunk: int) -> None:
    """Equal prompts, one of a single token, others that generate; the cache has what came before."""
    folder, model = reference
    engine, config = load(engine_name, folder, num_pages=120, page_size=4, max_prefill_length=chunk)
    generator = np.random.default_rng(4)
    prompts = [generator.integers(3, 131, n).tolist() for n in (40, 1, 16, 23)]
    prompts += [prompts[0], prompts[0][:30]]
    requests = {3 * i + at: (p, asks(pool)) for i, p in enumerate(prompts) for at, pool in enumerate(POOLINGS)}
    collector = Collector(engine, config)
    collector.run({100: (prompts[0], greedy(3))})
    collector.run({**requests, 101: (prompts[0], greedy(9))})
    engine.close()
    assert set(collector.embeddings) == set(requests) and len(collector.tokens[101]) == 9
    for req_id, (prompt, sampling) in requests.items():
        assert len(collector.tokens[req_id]) == 1
        found = embedded(collector, req_id)
        torch.testing.assert_close(found, expected(model, prompt, sampling.embedding or ""), rtol=0, atol=WITHIN)


def test_cpu_engine_embeddings_do_not_depend_on_chunks_or_batch(reference: Reference) -> None:
    folder, _ = reference
    prompt = np.random.default_rng(6).integers(3, 131, 50).tolist()
    found = set()
    for chunk, others in ((8192, 0), (5, 0), (16, 6)):
        engine, config = load("cpu", folder, num_pages=200, max_prefill_length=chunk)
        collector = Collector(engine, config)
        crowd = {i: ([i + 3] * 9, asks("last") if i % 2 else greedy(8)) for i in range(1, 1 + others)}
        collector.run({**crowd, 0: (prompt, asks("mean"))})
        engine.close()
        found.add(collector.embeddings[0])
    assert len(found) == 1


def test_a_retracted_prompt_starts_again(engine_name: str, reference: Reference) -> None:
    """Rows that generate need the pages of the prompt that is being computed."""
    folder, model = reference
    engine, config = load(engine_name, folder, num_pages=44, page_size=4, max_running_requests=5, max_prefill_length=6)
    collector = Collector(engine, config)
    collector.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output: rows will be retracted
    prompt = np.random.default_rng(8).integers(3, 131, 110).tolist()
    collector.run({**{i: ([i + 3, 9], greedy(60)) for i in range(3)}, 7: (prompt, asks("mean"))})
    engine.close()
    assert collector.plane.stats().num_retracted_total > 0
    torch.testing.assert_close(embedded(collector, 7), expected(model, prompt, "mean"), rtol=0, atol=WITHIN)
