"""What does not fit the memory says so before weights are read, and what would fit."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from minisgl import _rust
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import pool_size
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.engine.loading import load_engine
from minisgl.engine.pool_size import cpu_num_checkpoints, cpu_num_pages
from minisgl.utils.memory import Free
from tests.helpers.gguf import quiet, write_gguf, written_model
from tests.helpers.models import save

PAGE = 1000  # bytes


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its only number is what is free."""
    number = [100 * PAGE]
    monkeypatch.setattr(pool_size, "free_memory", lambda: Free(number[0], "here"))
    return number


@pytest.mark.parametrize(
    ("settings", "taken", "pages"),
    [
        ({}, 0, 50),
        ({}, 40 * PAGE, 30),
        ({"memory_ratio": 0.25}, 0, 25),
        ({"num_pages": 100}, 0, 100),
        ({"max_seq_len": 80 * 16}, 0, 80),  # more than the share, but it is asked for
        ({"max_seq_len": 16, "max_running_requests": 3}, 0, 3),
    ],
)
def test_num_pages_follows_flags_and_free_memory(
    free: list[int], settings: dict[str, object], taken: int, pages: int
) -> None:
    config = EngineConfig.of(settings)
    assert cpu_num_pages(config, PAGE, config.max_seq_len or 10**6, taken=taken) == pages


def test_the_pool_leaves_room_for_images(free: list[int]) -> None:
    assert cpu_num_pages(EngineConfig(), PAGE, 10**6, taken=20 * PAGE, tower=30 * PAGE) == 25
    config = EngineConfig.of({"max_seq_len": 60 * 16, "max_image_tokens": 99})
    with pytest.raises(ConfigError, match="--max-seq-len"):
        cpu_num_pages(config, PAGE, 60 * 16, taken=20 * PAGE, tower=30 * PAGE)
    with pytest.raises(ConfigError) as failed:
        cpu_num_pages(config, PAGE, 16, taken=20 * PAGE, tower=81 * PAGE)
    assert re.match("--max-image-tokens 99: .* --mmproj none does without images$", str(failed.value))
    with pytest.raises(ConfigError, match="its weights take"):
        cpu_num_pages(config, PAGE, 16, taken=101 * PAGE, tower=81 * PAGE)


@pytest.mark.parametrize(
    ("settings", "state", "pool", "count"),
    [
        ({}, 100, 40, 50),  # an eighth of the pool
        ({}, PAGE, 40, 8),  # few at least
        ({"num_pages": 10}, 30 * PAGE, 10, 1),  # of what is left
        ({"state_memory": 3099}, PAGE, 40, 3),
        ({"state_memory": 0}, PAGE, 40, 0),
        ({"state_memory": 58 * PAGE}, PAGE, 40, 58),
    ],
)
def test_num_checkpoints_follows_flags_and_free_memory(
    free: list[int], settings: dict[str, object], state: int, pool: int, count: int
) -> None:
    config = EngineConfig.of({"max_running_requests": 1, **settings})
    assert cpu_num_checkpoints(config, state, pool * PAGE, 0) == count


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"state_memory": 59 * PAGE}, "--state-memory 59000: .*: lower it, or --num-pages"),
        ({"max_running_requests": 100}, "--max-running-requests 100: .*: at most 99 fit"),
    ],
)
def test_states_beyond_free_memory_are_refused(free: list[int], settings: dict[str, object], said: str) -> None:
    config = EngineConfig.of({"max_running_requests": 1, **settings})
    with pytest.raises(ConfigError, match=said):
        cpu_num_checkpoints(config, PAGE, 40 * PAGE, 0)


def test_the_states_of_rows_are_counted(free: list[int]) -> None:
    config = EngineConfig.of({"max_running_requests": 19})
    assert cpu_num_pages(config, PAGE, 10**6, state=PAGE) == 40
    with pytest.raises(ConfigError, match=r"--max-running-requests 19: .* at most 9 fit"):
        cpu_num_pages(config, PAGE, 10**6, state=10 * PAGE)


@pytest.mark.parametrize(
    ("settings", "taken", "said"),
    [
        ({}, 101 * PAGE, "--model smollm2: its weights take 0 MiB of 0 MiB that are free here: choose a smaller"),
        ({"num_pages": 101}, 0, "--num-pages 101: .* at most 100 pages fit"),
        ({"num_pages": 61}, 40 * PAGE, "--num-pages 61: .* at most 60 pages fit"),
        (
            {"max_seq_len": 1601},
            0,
            "--max-seq-len 1601: .*: --max-seq-len 1600 fits, so does this one with --kv-dtype q8",
        ),
        ({"max_seq_len": 9999}, 0, "--max-seq-len 1600 fits, --max-seq-len 3200 with --kv-dtype q8"),
        ({"max_seq_len": 1600}, 40 * PAGE, "beside 0 MiB of weights: --max-seq-len 960 fits, so does this one with"),
        ({"max_seq_len": 99}, 100 * PAGE, "free memory, or choose a smaller model"),
        ({"memory_ratio": 0.001}, 0, "--memory-ratio 0.001: .* raise it"),
    ],
)
def test_sizes_beyond_free_memory_are_refused(
    free: list[int], settings: dict[str, object], taken: int, said: str
) -> None:
    config = EngineConfig.of(settings)
    with pytest.raises(ConfigError, match=said):
        cpu_num_pages(config, PAGE, config.max_seq_len or 10**6, taken=taken, one_in_q8=PAGE // 2)


@pytest.mark.parametrize(
    ("kind", "engine"), [("folder", "torch"), ("folder", "cpu"), ("file", "cpu"), ("parts", "cpu")]
)
def test_weights_beyond_free_memory_are_refused_before_reading(
    free: list[int], kind: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = written_model("qwen3-tied")
    if kind == "folder":
        path = save(model, tmp_path / "model", shards=True)
        sizes = [one.stat().st_size for one in path.glob("*.safetensors")]
        assert len(sizes) > 1
    else:
        path = write_gguf(tmp_path / "m.gguf", model, "qwen3", tensors_a_part=12 if kind == "parts" else 0)
        sizes = [one.stat().st_size for one in tmp_path.glob("*.gguf")]
        assert len(sizes) == (3 if kind == "parts" else 1)

    def read(*_: object) -> None:
        raise AssertionError("weights are read")

    sizes_of = {name: staticmethod(getattr(_rust.CpuEngine, name)) for name in ("page_bytes", "state_bytes")}
    monkeypatch.setattr(_rust, "CpuEngine", type("Engine", (), {"__init__": read, **sizes_of}))
    monkeypatch.setattr("minisgl.engine.loading.load_weights", read)
    load = load_cpu_engine if engine == "cpu" else load_engine
    free[0] = sum(sizes) - 1
    with pytest.raises(ConfigError, match=rf"^--model {re.escape(str(path))}: its weights take .* free here"):
        load(EngineConfig(model=str(path), engine=engine, device="cpu"), quiet)  # type: ignore[arg-type]
    free[0] = sum(sizes) + 5000
    if engine == "cpu":
        with pytest.raises(ConfigError, match=r"--max-seq-len 64: .* beside \d MiB of weights"):
            load(EngineConfig(model=str(path), engine="cpu", max_seq_len=64), quiet)


def test_memory_flag_bounds_weights_and_pool(free: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of it the pool gets all that the process and the weights leave, but for states a part."""
    monkeypatch.setattr("psutil.Process.memory_info", lambda _: SimpleNamespace(rss=5 * PAGE))
    config = EngineConfig.of({"memory": 45 * PAGE})
    assert cpu_num_pages(config, PAGE, 1600, taken=10 * PAGE) == 30
    with_states = cpu_num_pages(config, PAGE, 1600, taken=4 * PAGE, state=1)
    assert 31 <= with_states < 35
    free[0] = 20 * PAGE
    assert cpu_num_pages(config, PAGE, 1600, taken=10 * PAGE) == 10
    free[0] = 100 * PAGE
    with pytest.raises(ConfigError, match=r"its weights take .* of --memory"):
        cpu_num_pages(config, PAGE, 1600, taken=41 * PAGE)
