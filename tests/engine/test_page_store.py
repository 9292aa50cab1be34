"""Pages on disk as the CPU engine writes and loads them: what is loaded is what would be computed, bit for bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import SlotAssignment, StoreCounts
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.engine.page_store import digest_of, identity
from minisgl.step import Int32Array
from tests.helpers.models import save, tiny_model

pytestmark = pytest.mark.any_cpu

SIZE, PAGES, VOCAB = 8, 40, 258
SAMPLING = SamplingParams(temperature=0.7, seed=3, max_tokens=100, logprobs=5)
TEXT = np.random.default_rng(2).integers(3, 131, 77).astype(np.int32)
MODELS = ["qwen3-tied", "mistral-window", "gemma2-caps", "deepseek3-yarn", "gpt-oss", "gemma4", "llama4"]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(request.param), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3-tied", vocab_size=VOCAB), tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


def engine_of(folder: Path, **settings: Any) -> CpuEngine:
    config = {"page_size": SIZE, "num_pages": PAGES, "max_running_requests": 4, **settings}
    return load_cpu_engine(EngineConfig(model=str(folder), **config), lambda text, done=0, total=0: None)


Row = tuple[int, tuple[float, ...]]


def answer(engine: CpuEngine, pages: list[int], *, loads: bool = False, steps: int = 12) -> list[Row]:
    """Tokens of a text in these pages, with the log probabilities of the likeliest ones; `loads`: what the store has
    is not computed."""
    staged = engine.store.stage(TEXT, 0, (len(TEXT) - 1) // SIZE) if loads and engine.store is not None else None
    first = 0 if staged is None else staged.columns[1]
    binding = SlotAssignment(1, 7, SAMPLING, TEXT, len(TEXT), None, staged)
    found: list[Row] = []
    start, ids = first * SIZE, TEXT[first * SIZE :].tolist()
    for step in range(steps):
        at = range(start, start + len(ids))
        arrays: list[Any] = [
            ids,
            at,
            [pages[one // SIZE] * SIZE + one % SIZE for one in at],
            [1],
            [at.stop],
            [len(ids)],
            [0],
            [] if step else [1, 0, len(pages)],
            [] if step else pages,
        ]
        loaded = [1, 0, first] if first and not step else []
        tokens, logprobs, *_ = engine.rust.step(
            *map(_array, arrays), int(step > 0), [] if step else [binding], *map(_array, ([], [], [], loaded))
        )
        assert logprobs is not None
        found.append((int(tokens[0]), tuple(logprobs[3][0])))
        start, ids = at.stop, [-2]
    return found


def _array(numbers: Any) -> Int32Array:
    return np.array(numbers, np.int32)


def counts(engine: CpuEngine) -> StoreCounts:
    found = engine.store_counts()
    assert found is not None
    return found


@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "q8"])
def test_loaded_pages_equal_computed_ones(folder: Path, kv_dtype: str, tmp_path: Path) -> None:
    cold = engine_of(folder, kv_dtype=kv_dtype, cache_dir=str(tmp_path))
    computed = answer(cold, list(range(12)))
    cold.close()
    whole = (len(TEXT) + 11) // SIZE
    assert counts(cold).num_written == whole, "pages of the prompt and of the answer"
    warm = engine_of(folder, kv_dtype=kv_dtype, cache_dir=str(tmp_path))
    assert answer(warm, list(range(30, 18, -1)), loads=True) == computed
    assert counts(warm).num_loaded == (len(TEXT) - 1) // SIZE
    warm.close()
    assert counts(warm).num_written == 0, "they are there already"


def test_loaded_q4_pages_equal_computed_ones(tmp_path: Path) -> None:
    model = save(tiny_model("mistral"), tmp_path / "model")
    test_loaded_pages_equal_computed_ones(model, "q4", tmp_path / "cache")


@pytest.mark.parametrize(
    "other",
    [
        {"kv_dtype": "f32"},
        {"kv_dtype": "q8"},
        {"activations": "int8"},
        {"page_size": 4},
        {"quantization": "q8"},
        {"max_seq_len": 64},
        {"num_threads": 1, "max_running_requests": 9, "num_pages": 50},
    ],
    ids=str,
)
def test_settings_that_change_results_change_page_keys(small: Path, other: dict[str, Any], tmp_path: Path) -> None:
    first = engine_of(small, cache_dir=str(tmp_path))
    answer(first, list(range(12)))
    first.close()
    second = engine_of(small, cache_dir=str(tmp_path), **other)
    assert second.store is not None
    same = other.keys() <= {"num_threads", "max_running_requests", "num_pages", "max_seq_len"}
    assert second.store.stage(TEXT, 0, 9).columns == (0, 9 if same else 0)
    second.close()


def test_another_model_has_other_pages(small: Path, tmp_path: Path) -> None:
    first = engine_of(small, cache_dir=str(tmp_path / "cache"))
    answer(first, list(range(12)))
    first.close()
    file = small / "model.safetensors"
    other = tmp_path / "other"
    other.mkdir()
    for one in small.iterdir():
        (other / one.name).write_bytes(one.read_bytes())
    same = engine_of(other, cache_dir=str(tmp_path / "cache"))
    assert same.store is not None and same.store.stage(TEXT, 0, 9).columns == (0, 9), "a copy is the same"
    same.close()
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    (other / file.name).write_bytes(data)
    changed = engine_of(other, cache_dir=str(tmp_path / "cache"))
    assert changed.store is not None and changed.store.stage(TEXT, 0, 9).columns == (0, 0), "by one bit of a weight"
    changed.close()


def test_a_digest_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    file, known = tmp_path / "model", tmp_path / "cache" / "weights"
    file.write_bytes(bytes(1000))
    first = digest_of([file], known)
    (place,) = known.iterdir()
    place.write_bytes(bytes(32))
    assert digest_of([file], known) == bytes(32), "it is not read again"
    place.write_bytes(b"half")
    assert digest_of([file], known) == first
    os.utime(file, ns=(1, file.stat().st_mtime_ns))  # it changes what no program can set
    assert digest_of([file], known) == first and len(list(known.iterdir())) == 2
    file.write_bytes(bytes(999) + b"x")
    assert digest_of([file], known) != first
    known.rename(tmp_path / "gone")
    known.write_text("no folder")
    assert digest_of([file], known) != first
    with pytest.raises(OSError, match="none"):
        digest_of([tmp_path / "none"], known)


def test_the_classes_of_instruction_sets() -> None:
    names = [identity({"seed": 1, "isa": isa}, b"", isa) for isa in ("scalar", "avx2", "avx512", "neon", "amx")]
    assert len(set(names[:4])) == 1 and names[4] != names[0]


def test_loading_an_unstaged_page_fails_the_step(small: Path, tmp_path: Path) -> None:
    engine = engine_of(small, cache_dir=str(tmp_path))
    none = _array([])
    with pytest.raises(RuntimeError, match="page_loads: slot 1, page 0: not staged"):
        engine.rust.step(*[none] * 9, 0, [], none, none, none, _array([1, 0, 2]))
    assert answer(engine, list(range(12)))[0][0] >= 0, "the engine goes on"
    engine.close()


def test_a_folder_that_cannot_be_made_is_named(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--cache-dir .*file/cache: "):
        engine_of(small, cache_dir=str(tmp_path / "file" / "cache"))


@pytest.fixture
def llm_of(small: Path, tmp_path: Path) -> Iterator[Any]:
    opened: list[LLM] = []

    def open_one(**settings: Any) -> LLM:
        config = {
            "engine": "cpu",
            "page_size": SIZE,
            "num_pages": PAGES,
            "max_seq_len": 200,
            "cache_dir": str(tmp_path),
            **settings,
        }
        opened.append(LLM(str(small), log_level="error", **config))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.mark.usefixtures("no_amx")  # rows that are sent back are computed again
@pytest.mark.parametrize("cpu_backend", ["python", "rust_hotpath"])
def test_offline_a_second_process_finds_what_the_first_computed(llm_of: Any, cpu_backend: str) -> None:
    size = 2
    settings = {"cpu_backend": cpu_backend, "page_size": size, "num_pages": 160, "max_prefill_length": 1}
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    prompts = [TEXT[: 70 - i].tolist() + [9 + i] * 5 for i in range(4)]
    plain = llm_of(**settings | {"cache_dir": None})
    expected = [one.token_ids for one in plain.generate(prompts, params, progress=False)]
    first = llm_of(**settings)
    assert [one.token_ids for one in first.generate(prompts, params, progress=False)] == expected
    first.close()
    second = llm_of(**settings)
    found = second.generate(prompts, params, progress=False)
    assert [one.token_ids for one in found] == expected
    assert [one.num_cached_tokens for one in found] == [(len(one) - 1) // size * size for one in prompts], (
        "also of what later steps load"
    )
    longer = prompts[0] + expected[0]
    (found_longer,) = second.generate([longer], params, progress=False)
    assert found_longer.num_cached_tokens == (len(longer) - 1) // size * size, "answers are kept, too"
    (scored,) = second.generate(
        [prompts[0]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), progress=False
    )
    assert scored.num_cached_tokens == 0, "it wants every token computed"
    assert second.insert_prefix(TEXT.tolist()).num_tokens == len(TEXT)


def test_the_bits_of_a_page_are_those_of_this_version(small: Path, tmp_path: Path) -> None:
    """Fails when what the engine computes has other bits: then raise `NUMERICS` of engine/page_store.py, or pages of
    before would be taken for those of now."""
    settings: dict[str, Any] = {"load_format": "dummy", "cache_dir": str(tmp_path)}
    engine = engine_of(small, **settings)
    answer(engine, list(range(12)))
    engine.close()
    again = engine_of(small, **settings)
    assert again.store is not None
    staged = again.store.stage(TEXT, 0, 9)
    assert staged.columns == (0, 9)
    digest = hashlib.sha256(b"".join(staged.page(column) for column in range(9))).hexdigest()
    again.close()
    if "amx" not in again.info.details:
        assert digest[:16] == "0821dae48f808423"
