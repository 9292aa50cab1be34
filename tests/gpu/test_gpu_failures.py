"""Steps and starts that fail on the device: who ends, who goes on, what is said; how much memory is taken."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.attention.api import LayerAttention
from minisgl.attention.kv_pool import page_bytes
from minisgl.config import ConfigError
from minisgl.models.decoder import Attend
from minisgl.step import FinishReason
from tests.helpers.gpu import (
    FLOAT32_WITHIN,
    PLACE,
    REHEARSAL,
    Run,
    assert_alike,
    checkpoint,
    engine_of,
    greedily,
    only_on_a_gpu,
    run,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint("llama-bias-untied", tmp_path)[0]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Half a GiB of the device for this process, beside what stays: cuBLAS keeps a workspace for each stream of the
    engines before."""
    gc.collect()
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 2**29
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory() -> None:
    """The allocator's own refusal."""
    if REHEARSAL:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4096.00 GiB.\nrehearsed")
    torch.empty(2**42, dtype=torch.uint8, device=PLACE)


def break_forward(collector: Run, at: int, broken: Any) -> None:
    """The `at`-th forward: `broken(hidden)` in place of what it gives."""
    engine = collector.engine.engine  # type: ignore[attr-defined]
    forward, calls = engine.forward_model, []

    def called(ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        calls.append(len(ids))
        hidden: torch.Tensor = forward(ids, positions, attend)
        return broken(hidden) if len(calls) == at else hidden  # type: ignore[no-any-return]

    engine.forward_model = called


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("kind", ["out-of-memory", "not-finite"])
def test_a_step_that_fails_ends_its_requests_only(kind: str, at: int, folder: Path) -> None:
    """And what comes after is as if it had not been, the same prompts again: their pages were wiped."""
    later = {100 + i: one for i, one in greedily(10, seed=0).items()}
    expected = run(folder, later, dtype="float32")

    def drive(collector: Run) -> None:
        def fail(hidden: torch.Tensor) -> torch.Tensor:
            if kind == "out-of-memory":
                out_of_memory()
            return hidden * float("nan")

        break_forward(collector, at, fail)
        collector.run(greedily(10))
        failed = [i for i, reason in collector.reasons.items() if reason is FinishReason.ERROR]
        assert failed and len(collector.reasons) == 8
        said = {collector.errors[i] for i in failed}
        assert all(("out of memory" if kind == "out-of-memory" else "not finite") in text for text in said), said
        for kept in (collector.tokens, collector.reasons):
            kept.clear()  # type: ignore[attr-defined]
        collector.run(later)

    got = run(folder, {}, drive, dtype="float32")
    assert set(got.reasons.values()) == {FinishReason.LENGTH}
    assert_alike(got, expected, FLOAT32_WITHIN, at_least=0.9)


def test_a_pool_that_does_not_fit_names_the_flag(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num-pages .* at most \d+ pages fit"):
        run(folder, {}, num_pages=2**40)


@only_on_a_gpu("memory of a device")
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_the_pool_takes_its_share(ratio: float, tmp_path: Path) -> None:
    folder, model = checkpoint("qwen3-tied", tmp_path, max_position_embeddings=2**19)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    engine, config = engine_of(
        folder, dtype="bfloat16", num_pages=None, memory_ratio=ratio, max_running_requests=4096, max_prefill_length=64
    )
    taken = before - torch.cuda.mem_get_info()[0]
    of = model.config
    layer = LayerAttention(of.num_attention_heads, of.num_key_value_heads, of.head_dim, of.head_dim)
    one = page_bytes([layer] * 3, config.page_size, torch.bfloat16)
    pool = engine.info.num_pages * one
    engine.close()
    assert pool == pytest.approx(ratio * before, rel=0.05)
    assert pool <= taken <= pool + 0.05 * before + 2**30


@only_on_a_gpu("memory of a device")
def test_weights_that_do_not_fit_say_what_to_change(little_memory: None, tmp_path: Path) -> None:
    folder, _ = checkpoint("llama-bias-untied", tmp_path, intermediate_size=16_384, hidden_size=1024)
    with pytest.raises(ConfigError, match=r"out of device memory while loading: .*Try a smaller model"):
        engine_of(folder, dtype="float32")


@only_on_a_gpu("memory of a device")
def test_workspaces_that_do_not_fit_say_what_to_change(little_memory: None, folder: Path) -> None:
    """The pool takes what may be had; the page table of very long requests is too much then."""
    with pytest.raises(ConfigError, match=r"out of device memory while preparing the engine: .*--memory-ratio"):
        engine_of(folder, dtype="float32", max_running_requests=8_000_000, num_pages=32)


def test_the_rehearsal_fails_as_a_device_does(folder: Path) -> None:
    """What a test above takes for the allocator's refusal is one."""
    with pytest.raises(torch.OutOfMemoryError):
        out_of_memory()
