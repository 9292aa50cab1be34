"""Pages and states on disk of models whose layers keep states: what begins with a state from there is what is computed
from its first token on, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from tests.helpers.models import save, tiny_model
from tests.helpers.stores import counts, store_of

pytestmark = pytest.mark.any_cpu

SIZE = 8
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True, logprobs=3)
RNG = np.random.default_rng(3)
BEGIN = RNG.integers(3, 250, 70).tolist()
PROMPTS = [BEGIN + RNG.integers(3, 250, count).tolist() for count in (5, 20, 37)]
SETTINGS: dict[str, Any] = {
    "engine": "cpu",
    "log_level": "error",
    "page_size": SIZE,
    "num_pages": 60,
    "max_seq_len": 200,
    "max_running_requests": 4,
    "checkpoint_interval": 32,
}
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5", "granite-hybrid", "falcon-h1", "mamba2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(request.param, vocab_size=258), tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("lfm2", vocab_size=258), tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


def opened(model: Path, folder: Path | None, **settings: Any) -> LLM:
    return LLM(str(model), **SETTINGS | {"cache_dir": None if folder is None else str(folder)} | settings)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = PARAMS) -> tuple[Answers, list[int]]:
    """Tokens with the bits of their log probabilities; and how many tokens of each prompt were not computed."""
    found = llm.generate(prompts, params, progress=False)
    return [(one.token_ids, one.outputs[0].logprobs) for one in found], [one.num_cached_tokens for one in found]


def files(folder: Path, ending: str = "*") -> list[Path]:
    return sorted(folder.glob(f"??/{ending}"))


def borders(prompts: list[list[int]]) -> list[int]:
    """Up to where a prompt need not be computed."""
    return [(len(one) - 1) // SIZE * SIZE for one in prompts]


@pytest.mark.parametrize("cpu_backend", ["python", "rust_hotpath"])
def test_a_new_engine_begins_behind_the_last_page_with_the_bits_of_a_cold_start(
    model: Path, tmp_path: Path, cpu_backend: str
) -> None:
    with opened(model, None, cache="naive", cpu_backend=cpu_backend) as llm:
        cold, cached = answers(llm)
        assert cached == [0, 0, 0]
    with opened(model, tmp_path, cpu_backend=cpu_backend) as llm:
        assert answers(llm)[0] == cold
    with opened(model, tmp_path, cpu_backend=cpu_backend) as llm:
        found, cached = answers(llm)
        assert found == cold and cached == borders(PROMPTS)
        assert counts(llm).num_loaded_states == 3 and counts(llm).num_loaded >= 13
        stats = llm._loop.control_plane.stats()
        assert stats.num_prompt_tokens_total - stats.num_cached_tokens_total == sum(len(one) for one in PROMPTS) - sum(
            cached
        )
        longer = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, cold, strict=True)]
        answers(llm, longer)
        before = counts(llm).num_loaded_states
        assert answers(llm)[1] == borders(PROMPTS) and counts(llm).num_loaded_states == before, (
            "what was loaded has a checkpoint"
        )
    assert files(tmp_path, "*.state") and not [one for one in files(tmp_path) if len(one.name) not in (64, 70)]


def test_conversation_turn_resumes_from_stored_pages(model: Path, tmp_path: Path) -> None:
    """Three turns, each in an engine of its own."""
    talk, cached = list(BEGIN), list[int]()
    for _ in range(3):
        with opened(model, None, cache="naive") as llm:
            ((cold, _),), _ = answers(llm, [talk])
        with opened(model, tmp_path) as llm:
            ((found, _),), (count,) = answers(llm, [talk])
        assert found == cold
        cached.append(count)
        talk += [*found, *RNG.integers(3, 250, 11).tolist()]
    assert cached[0] == 0 and cached[1] >= (len(BEGIN) - 1) // SIZE * SIZE and cached[2] > cached[1]


def test_instruction_sets_of_equal_bits_share_states(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, loaded = [], []
    for isa in ("scalar", "avx2", "avx512"):
        monkeypatch.setenv("MINISGL_CPU_ISA", isa)
        try:
            llm = opened(model, tmp_path)
        except ConfigError as error:
            assert "MINISGL_CPU_ISA" in str(error), "this processor has it not"
            continue
        with llm:
            found.append(answers(llm)[0])
            loaded.append(counts(llm).num_loaded_states)
    assert all(one == found[0] for one in found)
    assert loaded[0] == 0 and loaded[1:] == [3] * len(loaded[1:])


def test_each_damaged_or_missing_file_is_computed(small: Path, tmp_path: Path) -> None:
    with opened(small, tmp_path) as llm:
        cold = answers(llm)[0]
    with opened(small, tmp_path) as llm:
        store = store_of(llm)
        for file in files(tmp_path):
            whole = file.read_bytes()
            for wrong in (whole[:-3] + bytes([whole[-3] ^ 8]) + whole[-2:], whole[:90], b"", None):
                file.unlink() if wrong is None else file.write_bytes(wrong)
                before = counts(llm).num_damaged
                llm.clear_cache()
                found, cached = answers(llm)
                assert found == cold
                assert all(one % SIZE == 0 and one <= most for one, most in zip(cached, borders(PROMPTS), strict=True))
                store.flush(60.0)
                read = counts(llm).num_damaged - before
                assert read <= (wrong is not None)
                file.write_bytes(whole)
        assert counts(llm).num_damaged > 20, counts(llm)
        assert counts(llm).num_loaded_states > 100


def test_stored_states_are_used_without_checkpoint_slots(small: Path, tmp_path: Path) -> None:
    with opened(small, tmp_path) as llm:
        cold = answers(llm)[0]
    with opened(small, tmp_path, state_memory=0) as llm:
        for _ in range(2):
            found, cached = answers(llm)
            assert found == cold and cached == borders(PROMPTS)
        assert counts(llm).num_loaded_states == 6


def test_retracted_request_resumes_from_stored_pages(small: Path, tmp_path: Path) -> None:
    prompts = [[3 + number] * (SIZE - 1) for number in range(6)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
    settings = {"max_running_requests": 6, "max_seq_len": 80, "checkpoint_interval": SIZE}

    def run(num_pages: int, folder: Path | None) -> tuple[Answers, int, int]:
        with opened(small, folder, num_pages=num_pages, **settings) as llm:
            found = answers(llm, prompts, params)[0]
            stats = llm._loop.control_plane.stats()
            return found, stats.num_retracted_total, stats.num_loaded_pages_total

    expected = run(60, None)[0]
    assert run(60, tmp_path) == (expected, 0, 0), "and writes all pages and states"
    found, num_retracted, num_loaded = run(20, tmp_path)
    assert found == expected and num_retracted > 0 and num_loaded > 0, (num_retracted, num_loaded)


@pytest.fixture
def slow(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    with opened(small, tmp_path) as llm:
        answers(llm)
    with opened(small, tmp_path) as llm:
        yield llm


def test_a_disk_that_is_slower_than_computing_is_not_waited_for(slow: LLM) -> None:
    cold = answers(slow)[0]
    store_of(slow).slow_down(0.5)
    slow.clear_cache()
    found, cached = answers(slow, [PROMPTS[0]])
    assert found == cold[:1] and cached[0] <= 5 * SIZE, cached
