"""Whatever engine computes models, under the real step loop: against transformers, in any cut of the work, with others
in the batch, aborted, and with a scheduler that breaks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl.message import AbortRequest, AddRequest
from minisgl.runner.build import build_control_plane, build_fallback
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import FinishReason
from tests.helpers.engines import NEEDS_CPU, Collector, assert_greedy, assert_logprobs, greedy, load
from tests.helpers.models import save, tiny_model

pytestmark = pytest.mark.any_cpu

VOCAB = 120
VARIANTS = (
    "llama-bias-untied",
    "qwen3-tied",
    "qwen2-window-in-the-last-layers",
    "mistral-window",
    "qwen3-moe-not-everywhere",
)
Reference = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=VARIANTS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny random checkpoint and the model that transformers makes of it."""
    model = tiny_model(
        request.param, vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=None, bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_row_that_is_not_finite_ends_alone_and_leaves_nothing(
    engine_name: str, page_size: int, overlap: bool, tmp_path: Path
) -> None:
    """Token 9 has a number that is none. The pages of its rows are others' soon, who read beyond their own ends."""
    model = tiny_model("qwen3-untied", vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[9, 3] = float("inf")
    settings = {"page_size": page_size, "num_pages": 160 // page_size, "max_prefill_length": 24}
    engine, config = load(engine_name, save(model, tmp_path), max_running_requests=5, **settings)
    params = SamplingParams(temperature=0, max_tokens=24, seed=0, logit_bias={9: -100.0})
    shared = [*range(20, 20 + page_size)]
    good = {i: ([*shared, 30 + i] if i % 2 else [40 + i, 5, 6], params) for i in range(5)}
    bad = {10: [*shared, 9, 7], 11: [9], 12: [4] * 30 + [9] + [4] * 30, 13: [*shared, 9, 7], 14: [1, 2] * 20 + [9]}
    collector = Collector(engine, config, overlap=overlap)
    for req_id, one in good.items():
        collector.run({req_id: one})
    alone = dict(collector.tokens)
    assert all(len(tokens) == 24 for tokens in alone.values())
    for again in range(1, 4):
        mixed = {100 * again + i: one for i, one in good.items()}
        for i, prompt in bad.items():
            mixed[100 * again + i] = (prompt, params)
        collector.run(dict(sorted(mixed.items(), key=lambda item: item[0] % 3)))
        for i in good:
            assert collector.tokens[100 * again + i] == alone[i], (i, collector.errors, collector.reasons)
        for i, prompt in bad.items():
            assert collector.reasons[100 * again + i] is FinishReason.ERROR
            assert "not finite" in collector.errors[100 * again + i]
            assert 100 * again + i not in collector.tokens
            assert collector.cached[100 * again + i] <= prompt.index(9), "the cache kept what is no numbers"
    engine.close()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_greedy_tokens_equal_transformers(
    engine_name: str, reference: Reference, page_size: int, overlap: bool
) -> None:
    """Mixed lengths, shared prefixes, chunked prefill, a pool that forces eviction and retraction."""
    folder, model = reference
    engine, config = load(
        engine_name,
        folder,
        page_size=page_size,
        num_pages=240 // page_size,
        max_prefill_length=24,
        max_running_requests=5,
    )
    generator = np.random.default_rng(page_size)
    shared = generator.integers(0, VOCAB, 40).tolist()
    prompts = [
        shared[: int(generator.integers(0, 40))] + generator.integers(0, VOCAB, n).tolist()
        for n in (1, 3, 17, 60, 5, 31, 2, 9)
    ]
    collector = Collector(engine, config, overlap=overlap)
    collector.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output: rows will be retracted
    collector.run({i: (prompt, greedy(40)) for i, prompt in enumerate(prompts)})
    engine.close()
    for i, prompt in enumerate(prompts):
        assert collector.reasons[i] is FinishReason.LENGTH and len(collector.tokens[i]) == 40
        assert_greedy(model, prompt, collector.tokens[i])
    assert collector.plane.stats().num_retracted_total > 0
    assert sum(collector.cached.values()) > 0


def test_seeded_sampling_does_not_see_the_batch(engine_name: str, reference: Reference) -> None:
    folder, _ = reference
    engine, config = load(engine_name, folder, num_pages=200)
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=9, max_tokens=30)
    prompt = list(range(10, 30))
    alone = Collector(engine, config)
    alone.run({0: (prompt, params)})
    others = {i: ([i, i + 1], SamplingParams(seed=i, max_tokens=30)) for i in range(1, 32)}
    crowd = Collector(engine, config)
    crowd.run({0: (prompt, params), **others})
    engine.close()
    assert crowd.tokens[0] == alone.tokens[0]
    assert len({tuple(tokens) for tokens in crowd.tokens.values()}) > 20


def test_logprobs_are_those_of_the_model(engine_name: str, reference: Reference) -> None:
    folder, model = reference
    engine, config = load(engine_name, folder, num_pages=64)
    collector = Collector(engine, config)
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=3)
    collector.run({0: (prompt, params), 1: ([8], greedy(6))})
    engine.close()
    assert 1 not in collector.logprobs and len(collector.logprobs[0]) == 6
    assert {len(top_ids) for _, top_ids, _ in collector.logprobs[0]} == {3}
    assert_logprobs(model, prompt, collector.tokens[0], collector.logprobs[0])


def test_aborted_requests_leave_the_others_as_they_were(engine_name: str, reference: Reference) -> None:
    folder, model = reference
    engine, config = load(engine_name, folder, num_pages=60, page_size=4, max_running_requests=4, max_prefill_length=16)
    collector = Collector(engine, config)
    prompts = {i: [i, 7, 8, 9] * (1 + i) for i in range(8)}
    adds = [AddRequest(i, np.array(p, np.int32).tobytes(), greedy(24)) for i, p in prompts.items()]
    collector.loop.step(adds)
    for step in range(200):
        collector.loop.step([AbortRequest(step // 3)] if step % 3 == 2 and step < 18 and step // 3 % 2 else [])
        if collector.loop.idle:
            break
    engine.close()
    aborted = {1, 3, 5}
    assert collector.plane.stats().num_live == 0
    for i in prompts.keys() - aborted:
        assert collector.reasons[i] is FinishReason.LENGTH
        assert_greedy(model, prompts[i], collector.tokens[i])


@pytest.mark.parametrize("order", ["commit:9:after", "schedule:12:before"])
def test_a_control_plane_that_breaks_is_not_noticed(engine_name: str, reference: Reference, order: str) -> None:
    folder, model = reference
    engine, config = load(engine_name, folder, num_pages=60, page_size=4, max_running_requests=4, max_prefill_length=16)
    collector = Collector(engine, config)
    faulty = make_faulty(build_control_plane(config, engine.info), order)
    collector.loop = StepLoop(
        faulty,
        engine,
        collector.deliver,
        fallback=lambda: build_fallback(config, engine.info),
        settings=LoopSettings(overlap=True),
    )
    prompts = {i: [5] * 9 + [i, 2] for i in range(8)}
    collector.loop.step([AddRequest(i, np.array(p, np.int32).tobytes(), greedy(20)) for i, p in prompts.items()])
    while not collector.loop.idle:
        collector.loop.step([])
    engine.close()
    assert collector.loop.num_failovers == 1
    for i, prompt in prompts.items():
        assert len(collector.tokens[i]) == 20
        assert_greedy(model, prompt, collector.tokens[i])


@NEEDS_CPU
def test_rows_of_the_cpu_engine_do_not_see_their_neighbours(reference: Reference) -> None:
    """Tokens and logprobs bit for bit, alone and among 63 others, whatever the pages and chunks."""
    folder, _ = reference
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=24, logprobs=2, ignore_eos=True)
    prompt = list(range(10, 57))
    found = []
    for page_size, chunk, others in ((16, 512, 0), (1, 8, 0), (4, 16, 63), (16, 2048, 63)):
        engine, config = load(
            "cpu",
            folder,
            page_size=page_size,
            num_pages=8192 // page_size,
            max_prefill_length=chunk,
            kv_dtype="f16",
        )
        collector = Collector(engine, config)
        crowd = {i: ([i, *range(i % 40)], SamplingParams(seed=i, max_tokens=24)) for i in range(1, others + 1)}
        collector.run({**crowd, 0: (prompt, params)})
        engine.close()
        found.append((collector.tokens[0], collector.logprobs[0]))
    assert all(one == found[0] for one in found)
