"""Engines that compute models, with guessed tokens and without: the same texts, and KV that others may use."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.llm import LLM
from minisgl.message import AbortRequest, AddRequest
from minisgl.runner.build import build_control_plane, build_engines
from minisgl.runner.drafting import DraftModel, DraftRequest
from minisgl.sampling_params import SamplingParams
from minisgl.step import Draft, FinishReason
from minisgl.tokenizer.echo import echo_json
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


def collect(
    name: str, folder: Path, speculative: str | None, *, overlap: bool, times: int, **settings: Any
) -> Collector:
    """The same requests, `times` times: the second time the prefix cache knows how they go on."""
    pool = {"page_size": 4, "num_pages": 400, "max_running_requests": 16, **settings}
    engine, config = load(name, folder, speculative=speculative, seed=1, **pool)
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


@NEEDS_CPU
def test_q4_kv_gives_equal_results_with_drafts_and_any_page_size(tmp_path: Path) -> None:
    model = tiny_model(
        "mistral", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None
    )
    ways: list[tuple[str | None, dict[str, Any]]] = [
        (None, {}),
        ("ngram:6", {}),
        (None, {"page_size": 16, "max_running_requests": 2}),
        ("ngram:6", {"page_size": 1, "num_pages": 1600}),
    ]
    folder = save(model, tmp_path)
    found = [collect("cpu", folder, how, overlap=True, times=2, kv_dtype="q4", **pool) for how, pool in ways]
    assert found[1].plane.stats().num_accepted_total > 100
    for other in found[1:]:
        assert (other.tokens, other.logprobs) == (found[0].tokens, found[0].logprobs)


@pytest.mark.parametrize("engine_name", MODEL_ENGINES)
def test_greedy_tokens_with_drafts_equal_those_without(engine_name: str, tmp_path: Path) -> None:
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
def test_aborts_and_retractions_with_drafts_leak_nothing(engine_name: str, folder: Path) -> None:
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


class Contrary(DraftModel):
    """It never says what it thinks."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = super().propose(requests)
        return [replace(one, tokens=tuple((token + 1) % LARGE_VOCAB for token in one.tokens)) for one in found]


LARGE_VOCAB = 131  # texts of so many words repeat less


def small_model(folder: Path, kind: type[DraftModel]) -> DraftModel:
    engine, config = load("cpu", folder, page_size=4, num_pages=300, max_running_requests=4, max_prefill_length=32)
    return kind(engine, build_control_plane(config, engine.info), LARGE_VOCAB)


def idle_pages(model: DraftModel) -> int:
    plane = model.control_plane
    plane.check()
    assert plane.stats().num_live == plane.stats().num_draining == 0
    return plane.stats().num_free_pages + plane.stats().num_evictable_pages


def few(**changes: Any) -> dict[int, tuple[list[int], SamplingParams]]:
    """Two requests, whose prompts are longer than a chunk of the small model."""
    generator = np.random.default_rng(5)
    params = SamplingParams(**{"temperature": 0.0, "seed": 4, "max_tokens": 60, "logprobs": 1, **changes})
    return {i: (generator.integers(0, LARGE_VOCAB, 50).tolist(), params) for i in range(2)}


@NEEDS_CPU
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", [DraftModel, Contrary])
def test_drafts_of_a_small_model_do_not_change_results(kind: type[DraftModel], overlap: bool, tmp_path: Path) -> None:
    """One that is the large one is always right where the text is greedy; one that never agrees is seldom asked."""
    model = tiny_model("llama-linear-mha", max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None)
    folder = save(model, tmp_path)
    for changes in ({}, {"temperature": 0.8}):
        engine, config = load("cpu", folder, page_size=4, num_pages=400, max_running_requests=12)
        plain = Collector(engine, config, overlap=overlap)
        plain.run(few(**changes))
        engine.close()
        engine, config = load(
            "cpu", folder, page_size=4, num_pages=400, max_running_requests=12, speculative="model:itself:4"
        )
        small = small_model(folder, kind)
        drafting = Collector(engine, config, overlap=overlap, guesses=small)
        drafting.run(few(**changes))
        engine.close()
        assert drafting.tokens == plain.tokens and drafting.logprobs == plain.logprobs
        stats = drafting.plane.stats()
        assert stats.num_free_pages + stats.num_evictable_pages == 400
        assert idle_pages(small) == 300
        small.close()
        if kind is DraftModel and not changes:
            assert stats.num_accepted_total > 80 and drafting.loop.num_steps < plain.loop.num_steps / 2
        if kind is Contrary and not changes:
            assert stats.num_drafted_total < 60


@NEEDS_CPU
def test_torch_engine_accepts_drafts_of_a_small_model(tmp_path: Path) -> None:
    """Its tokens are those of the model; the small one is the same on the CPU engine, and so nearly always right."""
    model = tiny_model("llama-linear-mha", max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None)
    folder = save(model, tmp_path)
    small = small_model(folder, DraftModel)
    engine, config = load(
        "torch", folder, page_size=4, num_pages=400, max_running_requests=12, speculative="model:itself:4"
    )
    collector = Collector(engine, config, guesses=small)
    prompts = {i: [i, 1, 2, 3, 50 + i] for i in range(2)}
    collector.run({i: (prompt, greedy(60)) for i, prompt in prompts.items()})
    engine.close()
    assert idle_pages(small) == 300
    small.close()
    for i, prompt in prompts.items():
        assert len(collector.tokens[i]) == 60
        assert_greedy(model, prompt, collector.tokens[i])
    assert collector.plane.stats().num_accepted_total > 80


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A model with a vocabulary."""
    model = tiny_model("llama-linear-mha", vocab_size=260, max_position_embeddings=CONTEXT)
    return save(model, tmp_path / "model", tokenizer=True)


@NEEDS_CPU
def test_memory_of_the_draft_model_counts_towards_memory_flag(spoken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
    monkeypatch.setattr("minisgl.engine.pool_size.psutil.Process", lambda: process)
    pools, memory = {}, 8 << 20
    for speculative in (None, f"model:{spoken}:4"):
        config = EngineConfig.of({"model": str(spoken), "engine": "cpu", "memory": memory, "speculative": speculative})
        engine, small = build_engines(config, lambda text, done=0, total=0: None)
        assert isinstance(engine, CpuEngine)
        pools[speculative] = engine.pool_bytes
        engine.close()
    assert isinstance(small, DraftModel) and isinstance(small.engine, CpuEngine)
    of_small, own = small.engine.info, pools[speculative]
    taken = of_small.num_pages * 4 * 384  # bytes of a token: 3 layers, 2 heads of 16 keys and values, 2 bytes each
    assert 0 < taken <= memory // 8
    assert own <= pools[None] - taken + 16 * 384 < pools[None], "to a page"
    small.close()


@NEEDS_CPU
def test_another_vocabulary_is_refused_by_name(spoken: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(spoken, other)
    (other / "tokenizer.json").write_text(echo_json().replace('"!"', '"~~"'))
    match = "--speculative model:.*other: the draft model's vocabulary differs from that of --model model: id 33"
    with pytest.raises(ConfigError, match=match):
        LLM(str(spoken), engine="cpu", num_pages=64, speculative=f"model:{other}", log_level="error")
