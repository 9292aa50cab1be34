"""What takes long: shapes that people run with dummy weights, and the compiler."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.async_compile import shutdown_compile_workers

from benchmark.gpu.shapes import SHAPES, write_shape
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.gpu import BFLOAT16_WITHIN, REHEARSAL, assert_alike, checkpoint, greedily, only_on_a_gpu, run

LONG = {"load_format": "dummy", "dtype": "bfloat16", "num_pages": 512, "max_seq_len": 2048, "max_prefill_length": 256}


def test_torch_compile_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if REHEARSAL:  # traced, but not compiled
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    folder, _ = checkpoint("qwen3-tied", tmp_path)
    settings: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "torch_sdpa"}
    compiled, eager = (run(folder, greedily(), torch_compile=flag, **settings) for flag in (True, False))
    assert_alike(compiled, eager, BFLOAT16_WITHIN, at_least=0.3)
    torch.compiler.reset()
    shutdown_compile_workers()  # torch keeps them for what comes; a file of tests leaves no process behind


@only_on_a_gpu("billions of weights")
@pytest.mark.parametrize("shape", sorted(SHAPES, key=lambda name: ("30b" in name or "32b" in name, name)))
def test_dummy_weights_of_big_shapes(shape: str, tmp_path: Path) -> None:
    """In graphs where the shape has them, prompts in chunks, equal prompts sharing pages; logits are finite and not
    all the same; two requests with one prompt say the same."""
    folder = write_shape(shape, tmp_path / shape)
    long = [7 * i % 90_000 for i in range(700)]
    prompts = {0: long, 1: long[:100], 2: [5], 3: [5]}
    wanted = {i: (prompt, SamplingParams(temperature=0, max_tokens=12, seed=0)) for i, prompt in prompts.items()}
    got = run(folder, wanted, max_running_requests=8, **LONG)  # type: ignore[arg-type]
    assert set(got.reasons.values()) == {FinishReason.LENGTH}
    for of in got.logits.values():
        for logits in of.values():
            assert bool(logits.isfinite().all()) and float(logits.std()) > 0
    assert torch.allclose(got.logits[2][1], got.logits[3][1], atol=BFLOAT16_WITHIN)
