"""Engines that compute models, with guessed tokens and without: the same texts, and KV that others may use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl.message import AbortRequest, AddRequest
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.engines import MODEL_ENGINES, NEEDS_CPU, Collector, assert_greedy, greedy, load
from tests.helpers.models import save, tiny_model

pytestmark = pytest.mark.any_cpu

VOCAB = 24
CONTEXT = 512


@pytest.fixture(scope="module", params=["llama-linear-mha", "mistral-window", "qwen3-moe-not-everywhere"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of few words, so that texts repeat."""
    model = tiny_model(
        request.param, vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp(request.param))


def requests() -> dict[int, tuple[list[int], SamplingParams]]:
    """Greedy and seeded ones, some with log probabilities, one with penalties."""
    generator = np.random.default_rng(3)
    found = {}
    for i in range(8):
        prompt = generator.integers(0, VOCAB, int(generator.integers(3, 40))).tolist()
        changes = {"temperature": 0.4} if i % 2 else {"temperature": 0.0}
        if i == 7:
            changes |= {"frequency_penalty": 0.5}
        params = SamplingParams(seed=i, max_tokens=60, logprobs=1 if i in (2, 3) else None, **changes)  # type: ignore[arg-type]
        found[i] = (prompt, params)
    return found


def collect(name: str, folder: Path, speculative: str | None, *, overlap: bool, times: int) -> Collector:
    """The same requests, `times` times: the second time the prefix cache knows how they go on."""
    engine, config = load(
        name, folder, page_size=4, num_pages=400, max_running_requests=16, speculative=speculative, seed=1
    )
    collector = Collector(engine, config, overlap=overlap)
    for time in range(times):
        collector.run({100 * time + i: request for i, request in requests().items()})
    engine.close()
    return collector


@NEEDS_CPU
@pytest.mark.parametrize("overlap", [True, False])
def test_the_cpu_engine_gives_the_same_bits(folder: Path, overlap: bool) -> None:
    plain, drafting = (
        collect("cpu", folder, speculative, overlap=overlap, times=2) for speculative in (None, "ngram:6")
    )
    assert drafting.tokens == plain.tokens
    assert drafting.logprobs == plain.logprobs, "to the last bit"
    stats = drafting.plane.stats()
    assert stats.num_accepted_total > 100 and plain.plane.stats().num_drafted_total == 0
    assert stats.num_free_pages + stats.num_evictable_pages == 400


@pytest.mark.parametrize("engine_name", MODEL_ENGINES)
def test_greedy_tokens_with_guesses_are_those_of_the_model(engine_name: str, tmp_path: Path) -> None:
    model = tiny_model(
        "qwen3-tied", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None
    )
    engine, config = load(
        engine_name, save(model, tmp_path), page_size=4, num_pages=400, max_running_requests=16, speculative="ngram:6"
    )
    collector = Collector(engine, config)
    prompts = {i: [i, 1, 2, 3, i, 1, 2, 3] for i in range(4)}
    collector.run({i: (prompt, greedy(60)) for i, prompt in prompts.items()})
    collector.run({10 + i: (prompt, greedy(60)) for i, prompt in prompts.items()})
    engine.close()
    assert collector.plane.stats().num_accepted_total > 50
    for i, prompt in prompts.items():
        for tokens in (collector.tokens[i], collector.tokens[10 + i]):
            assert len(tokens) == 60
            assert_greedy(model, prompt, tokens)


@pytest.mark.parametrize("engine_name", MODEL_ENGINES)
def test_aborts_and_too_few_pages_leave_nothing(engine_name: str, folder: Path) -> None:
    """Rows with drafts are retracted and aborted while these are in flight."""
    engine, config = load(
        engine_name,
        folder,
        page_size=4,
        num_pages=60,
        max_running_requests=8,
        max_prefill_length=16,
        speculative="ngram:4",
    )
    collector = Collector(engine, config)
    collector.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # no output is expected: rows will be retracted
    for i, (prompt, params) in requests().items():
        collector.loop.step([AddRequest(i, np.array(prompt, np.int32).tobytes(), params)])
    for _ in range(40):
        collector.loop.step([])
        collector.plane.check()
    collector.loop.step([AbortRequest(i) for i in (1, 4)])
    while not collector.loop.idle:
        collector.loop.step([])
        collector.plane.check()
    engine.close()
    stats = collector.plane.stats()
    assert stats.num_retracted_total and stats.num_drafted_total
    assert stats.num_free_pages + stats.num_evictable_pages == 60
    ends = {i: reason for i, reason in collector.reasons.items() if i not in (1, 4)}
    assert set(ends.values()) == {FinishReason.LENGTH} and len(ends) == 6
