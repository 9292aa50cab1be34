"""Random trees of requests for models whose layers keep a state: with hits, forks, evictions, retractions, chunks and
pages of any size, each answer is bit for bit that of a request which is alone and computed from its first token on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.engines import Collector, TimedRequest
from tests.helpers.models import save, tiny_model
from tests.helpers.processor import without_amx
from tests.helpers.property import Draw, draw_from

pytestmark = pytest.mark.any_cpu

VOCAB, CONTEXT = 60, 128
MODELS = ("lfm2", "lfm2-bias")
NUM_SEEDS, NUM_SEEDS_SLOW = 25, 500
BROUGHT_ABOUT = {"found", "computed again", "saved", "retracted", "evicted", "aborted"}


@dataclass
class Scenario:
    config: EngineConfig
    requests: list[TimedRequest]


class Cold:
    """What requests are answered alone, each computed from its first token on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._collector = collector(EngineConfig(model=str(folder), cache="naive", num_pages=16, num_threads=1))
        self._count = 0

    def answer(self, request: TimedRequest) -> tuple[list[int], list[object]]:
        self._count += 1
        self._collector.run({self._count: (request.prompt, request.sampling)})
        return self._collector.tokens[self._count], list(self._collector.logprobs[self._count])


def collector(config: EngineConfig) -> Collector:
    engine = load_cpu_engine(config, lambda text, done=0, total=0: None)
    return Collector(engine, config, overlap=config.overlap)


@pytest.fixture(scope="module", params=MODELS)
def cold(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cold]:
    made = tiny_model(request.param, vocab_size=VOCAB, max_position_embeddings=CONTEXT)
    with without_amx():  # retracted rows are computed again
        yield Cold(save(made, tmp_path_factory.mktemp("model")))


def make_scenario(draw: Draw, cold: Cold) -> Scenario:
    page_size = (1, 4, 16)[draw(0, 2)]
    rows = draw(1, 6)
    config = EngineConfig(
        model=str(cold.folder),
        page_size=page_size,
        num_pages=max(2, draw(24, 90) // page_size),
        max_running_requests=rows,
        max_prefill_length=(1, 5, 24, 200)[draw(0, 3)],
        checkpoint_interval=page_size * draw(1, 5),
        state_memory=draw(0, 9) * 4096,
        cpu_backend=("python", "rust_hotpath")[draw(0, 1)],
        cache=("lru", "lfu")[draw(0, 1)],  # type: ignore[arg-type]
        overlap=bool(draw(0, 3)),
        num_threads=draw(1, 3),
    )
    assert config.num_pages is not None
    limit = min(CONTEXT, config.num_pages * page_size)
    found, texts = list[TimedRequest](), list[list[int]]()
    for req_id in range(draw(2, 9)):
        prompt = [draw(3, VOCAB - 1) for _ in range(draw(1, 30))]
        if texts and draw(0, 3):
            known = texts[draw(0, len(texts) - 1)]
            prompt = known[: draw(1, len(known))] + prompt[: draw(0, 12)]
        prompt = prompt[: limit - 2]
        arrives = draw(0, 20)
        sampling = SamplingParams(
            max_tokens=draw(1, max(1, min(40, limit - len(prompt) - 1))),
            temperature=(0.0, 0.9)[draw(0, 1)],
            seed=draw(0, 99),
            logprobs=2,
        )
        aborted = arrives + draw(0, 20) if draw(0, 7) == 0 else -1
        request = TimedRequest(req_id, arrives, prompt, sampling, aborted)
        texts.append(prompt + cold.answer(request)[0])
        found.append(request)
    return Scenario(config, found)


def run(scenario: Scenario, cold: Cold) -> Counter[str]:
    """What it brought about; anything else than the cold answers is an `AssertionError`."""
    got = collector(scenario.config)
    got.drive(scenario.requests)
    got.close()
    for i, request in enumerate(scenario.requests):
        tokens, logprobs = cold.answer(request)
        mine = got.tokens.get(i, [])
        if got.reasons[i] is not FinishReason.ABORT:
            assert got.reasons[i] in (FinishReason.STOP, FinishReason.LENGTH), got.errors
            assert len(mine) == len(tokens), f"request {i}"
        assert mine == tokens[: len(mine)], f"request {i}"
        assert got.logprobs.get(i, []) == logprobs[: len(mine)], f"request {i}: other bits"
    stats = got.plane.stats()
    return Counter(
        {
            "found": stats.num_cached_tokens_total,
            "computed again": stats.num_computed_again_total,
            "saved": stats.num_saved_total,
            "retracted": stats.num_retracted_total,
            "evicted": stats.num_evicted_pages_total,
            "aborted": list(got.reasons.values()).count(FinishReason.ABORT),
        }
    )


def run_seeds(first: int, count: int, cold: Cold) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found.update(run(make_scenario(draw_from(seed), cold), cold))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert {name for name, times in found.items() if times} == BROUGHT_ABOUT, "these scenarios test too little"
    return found


def test_cache_hit_gives_the_results_of_a_cold_start(cold: Cold) -> None:
    run_seeds(0, NUM_SEEDS, cold)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_seeded_long(cold: Cold, times: int) -> None:
    print(dict(run_seeds(1_000_000, times * NUM_SEEDS_SLOW, cold)))


@pytest.mark.parametrize("variant", ["lfm2", "qwen3.5", "granite-hybrid"])
@pytest.mark.parametrize("backend", ["python", "rust_hotpath"])
def test_non_finite_state_is_not_saved(variant: str, backend: str, tmp_path: Path) -> None:
    """Token 9 has a number that is none. Slots of its rows, and those that they saved into, are others' soon."""
    model = tiny_model(variant, vocab_size=VOCAB, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[9, 3] = float("inf")
    config = EngineConfig(
        model=str(save(model, tmp_path)),
        page_size=4,
        num_pages=60,
        max_running_requests=5,
        max_prefill_length=24,
        checkpoint_interval=4,
        num_threads=2,
        cpu_backend=backend,  # type: ignore[arg-type]
    )
    params = SamplingParams(temperature=0, max_tokens=20, seed=0, logit_bias={9: -100.0}, logprobs=2, ignore_eos=True)
    shared = [*range(20, 28)]
    good = {i: ([*shared, 30 + i, 5, 6] if i % 2 else [40 + i, 5, 6], params) for i in range(6)}
    bad = {10: [*shared, 9, 7], 11: [9] * 9, 12: [4] * 30 + [9] + [4] * 30, 13: [*shared, 5, 9, *range(10, 20)]}
    alone = collector(config)
    for i, one in good.items():
        alone.run({i: one})
    got = collector(config)
    for again in range(1, 4):
        mixed = {100 * again + i: one for i, one in good.items()}
        mixed |= {100 * again + i: (prompt, params) for i, prompt in bad.items()}
        got.run(dict(sorted(mixed.items(), key=lambda item: item[0] % 3)))
        for i in good:
            assert got.tokens[100 * again + i] == alone.tokens[i], (got.errors, got.reasons)
            assert got.logprobs[100 * again + i] == alone.logprobs[i], f"request {i}: other bits"
        for i, prompt in bad.items():
            assert got.reasons[100 * again + i] is FinishReason.ERROR
            assert "not finite" in got.errors[100 * again + i]
            assert got.cached[100 * again + i] <= prompt.index(9), "a state that is no numbers was found"
        kept = got.plane.tree_states()  # type: ignore[attr-defined]
        assert kept and all(9 not in path for path, _ in kept), "a state that is no numbers was kept"
    assert got.plane.stats().num_saved_total > len(kept) and max(got.cached.values()) > 0
    alone.close()
    got.close()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read memory from")
def test_memory_is_that_of_the_slots_and_does_not_grow(tmp_path: Path, times: int) -> None:
    """`--times 10`: 20,000 requests."""
    model = tiny_model("lfm2", vocab_size=VOCAB, hidden_size=256, conv_L_cache=17, max_position_embeddings=CONTEXT)
    state, slots, pages = 2 * 16 * 256 * 4, 900, 2000
    config = EngineConfig(
        model=str(save(model, tmp_path)),
        page_size=4,
        num_pages=pages,
        max_running_requests=8,
        checkpoint_interval=4,
        state_memory=slots * state,
        num_threads=1,
    )
    got, draw, seen = collector(config), draw_from(3), list[int]()
    assert got.engine.info.num_checkpoints == slots
    shared = [[draw(3, VOCAB - 1) for _ in range(24)] for _ in range(300)]
    ended = 0
    for count in range(2000 * times):
        prompt = shared[draw(0, len(shared) - 1)][: draw(5, 24)] + [draw(3, VOCAB - 1) for _ in range(draw(1, 6))]
        got.add({count: (prompt, SamplingParams(temperature=0, max_tokens=draw(1, 4), seed=0))})
        while ended + len(got.reasons) < count - 6:
            got.loop.step([])
        if count % (100 * times) == 0:
            ended += len(got.reasons)
            got.forget()
            seen.append(_resident())
    stats = got.plane.stats()
    assert stats.num_checkpoints >= slots - 8 and stats.num_saved_total > 2 * slots, "not all slots were in use"
    half, grown = len(seen) // 2, (seen[-1] - seen[0]) / 2**20
    print(
        f"{grown:.1f} MiB of {slots * state / 2**20:.1f} MiB of slots; then {(seen[-1] - seen[half]) / 2**20:.2f} MiB"
    )
    assert seen[-1] - seen[half] < 0.05 * slots * state, "it grows"
    got.close()
