"""Every architecture through the torch engine against transformers on the same device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.step import FinishReason
from tests.helpers.gpu import (
    FLOAT32_WITHIN,
    PLACE,
    assert_as_exact_as_transformers,
    checkpoint,
    engine_logits,
    greedily,
    prompts,
    reference_logits,
    run,
)
from tests.helpers.models import TIE_WITHIN
from tests.helpers.variants import VARIANTS


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_float32(variant: str, tmp_path: Path) -> None:
    """Mixed prompts in chunks, some with a common beginning: logits within a bound, greedy tokens but for near-ties."""
    folder, model = checkpoint(variant, tmp_path)
    got = run(folder, greedily(), dtype="float32")
    model.to(PLACE)
    for i, prompt in enumerate(prompts()):
        assert got.reasons[i] is FinishReason.LENGTH
        expected, tokens = reference_logits(model, prompt, got.tokens[i]), torch.tensor(got.tokens[i])
        off = float((engine_logits(got, i) - expected).abs().max())
        assert off <= FLOAT32_WITHIN, f"prompt {i}: logits differ by {off:.5f}"
        behind = expected.amax(-1) - expected.gather(1, tokens[:, None])[:, 0]
        assert float(behind.max()) <= TIE_WITHIN, f"prompt {i}: not a greedy token of the reference"
    assert sum(got.cached.values()) > 0


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_bfloat16(variant: str, tmp_path: Path) -> None:
    folder, model = checkpoint(variant, tmp_path)
    got = run(folder, greedily(), dtype="bfloat16")
    assert_as_exact_as_transformers(got, model, greedily(), experts="moe" in variant)
