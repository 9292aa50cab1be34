"""Every attention backend that is there, on the device: against transformers and against torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gpu import (
    WIDE,
    WIDE_WINDOW,
    WITHIN,
    assert_alike,
    assert_as_exact_as_transformers,
    checkpoint,
    greedily,
    need_backend,
    run,
)

# FlashInfer knows heads of 64, 128 and 256 values
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "groups-of-2": ("qwen3-tied", WIDE),
    "groups-of-8": ("qwen3-tied", {**WIDE, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "groups-of-3": (
        "llama-bias-untied",
        {
            "head_dim": 64,
            "hidden_size": 576,
            "initializer_range": 0.05,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "heads-of-128": ("qwen3-tied", {**WIDE, "head_dim": 128}),
    "window": ("mistral-window", WIDE_WINDOW),
    "window-in-some-layers": ("qwen2-window-in-the-last-layers", WIDE_WINDOW),
}
BACKENDS: dict[str, dict[str, Any]] = {
    "torch_sdpa": {},
    "flashinfer": {},
    "flashinfer:fa3": {},
    "flash_attention": {"page_size": 256, "num_pages": 12},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_as_exact_as_transformers(backend: str, case: str, tmp_path: Path) -> None:
    need_backend(backend)
    if backend.endswith(":fa3") and case != "heads-of-128":
        pytest.skip("compiling fa3 takes minutes: heads of 128 will do")
    variant, changes = CASES[case]
    folder, model = checkpoint(variant, tmp_path, **changes)
    got = run(folder, greedily(), dtype="bfloat16", attention_backend=backend, **BACKENDS[backend])
    assert_as_exact_as_transformers(got, model, greedily())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "page_size"), [("bfloat16", 1), ("bfloat16", 64), ("float16", 16)])
def test_flashinfer_gives_the_logits_of_torch(dtype: str, page_size: int, case: str, tmp_path: Path) -> None:
    """Chunked prompts beside decode rows, shared pages."""
    need_backend("flashinfer")
    variant, changes = CASES[case]
    folder, _ = checkpoint(variant, tmp_path, **changes)
    settings: dict[str, Any] = {"dtype": dtype, "page_size": page_size, "num_pages": 1600 // page_size}
    got, expected = (run(folder, greedily(), attention_backend=b, **settings) for b in ("flashinfer", "torch_sdpa"))
    assert_alike(got, expected, WITHIN[dtype], at_least=0.3)
    assert sum(got.cached.values()) > 0 or page_size == 64
