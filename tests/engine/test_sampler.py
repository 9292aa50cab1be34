"""The samplers of the torch engine and of the CPU engine: exact where they must be, distributed as they should be,
blind to the rest of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.engine.sampler import uniforms
from tests.helpers.samplers import SAMPLERS, SamplingRows, draw

pytestmark = pytest.mark.any_cpu
both = pytest.mark.parametrize("kind", SAMPLERS)


def rows(count: int, *, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, seed: int = 0) -> SamplingRows:
    """`count` rows of one request at positions 0 .. count - 1."""
    return SamplingRows(
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p),
        torch.zeros(count),
        torch.full((count,), seed),
        torch.arange(count),
    )


def pick(all_rows: SamplingRows, at: Tensor) -> SamplingRows:
    return SamplingRows(
        all_rows.temperature[at],
        all_rows.top_k[at],
        all_rows.top_p[at],
        all_rows.min_p[at],
        all_rows.seed[at],
        all_rows.position[at],
    )


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_first_maximum(kind: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(5, 151_936, dtype=dtype)
    logits[0, [7, 9]] = 2.0
    logits[1, 151_935] = 1.0
    logits[2] = -3.0
    logits[3, [100_000, 140_000]] = 5.0
    logits[4, 1:] = -1.0
    assert draw(kind, logits, rows(5, temperature=0.0)).tolist() == [7, 151_935, 0, 100_000, 0]


@both
def test_draws_follow_the_distribution(kind: str) -> None:
    """Chi-square over 20,000 positions, seeded; 7 degrees of freedom: 24.3 is the 0.1 % point."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.2])
    count = 20_000
    for temperature in (0.7, 1.0, 1.8):
        tokens = draw(kind, logits.expand(count, -1), rows(count, temperature=temperature, seed=11))
        expected = (logits / temperature).softmax(-1) * count
        observed = torch.bincount(tokens, minlength=8)
        assert float(((observed - expected) ** 2 / expected).sum()) < 24.3


@both
def test_seed_and_position_decide(kind: str) -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    first = draw(kind, logits, rows(64, seed=1))
    assert torch.equal(first, draw(kind, logits, rows(64, seed=1)))
    assert (first != draw(kind, logits, rows(64, seed=2))).float().mean() > 0.8
    same_logits = logits[:1].expand(64, -1)
    assert len(set(draw(kind, same_logits, rows(64, seed=1)).tolist())) > 20


@both
def test_batch_does_not_matter(kind: str) -> None:
    """Alone and among 31 others, with every mix of parameters, the same token from the same logits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(32, 5000, generator=generator) * 3
    mixed = SamplingRows(
        torch.rand(32, generator=generator) * 2 * (torch.arange(32) % 4 != 0),
        torch.tensor([-1, 1, 5, 50] * 8),
        torch.tensor([1.0, 0.9, 0.5, 1.0, 0.99, 1.0, 0.1, 0.7] * 4),
        torch.tensor([0.0, 0.0, 0.05, 0.3] * 8),
        torch.randint(-(2**62), 2**62, (32,), generator=generator),
        torch.randint(0, 8000, (32,), generator=generator),
    )
    together = draw(kind, logits, mixed)
    for row in range(32):
        at = torch.tensor([row])
        assert draw(kind, logits[at], pick(mixed, at)).item() == together[row].item()
    order = torch.randperm(32, generator=generator)
    assert torch.equal(draw(kind, logits[order], pick(mixed, order)), together[order])


@both
@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"),
    [
        (1, 1.0, {2}),
        (2, 1.0, {2, 5}),
        (100, 1.0, set(range(8))),
        (-1, 1e-6, {2}),
        (-1, 0.5, {2, 5}),
        (3, 0.999, {1, 2, 5}),
        (2, 0.5, {2}),  # of the two that top-k leaves, the first has more than half
    ],
)
def test_truncation_keeps_top_k_and_top_p_tokens(kind: str, top_k: int, top_p: float, allowed: set[int]) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.2])  # probabilities .05 .15 .40 .02 .09 .24 .01 .07
    tokens = draw(kind, logits.expand(3000, -1), rows(3000, top_k=top_k, top_p=top_p, seed=5))
    assert set(tokens.tolist()) == allowed


@both
def test_ties_at_the_cut_go_to_lower_ids(kind: str) -> None:
    tokens = draw(kind, torch.zeros(2000, 6), rows(2000, top_k=3, seed=8))
    assert set(tokens.tolist()) == {0, 1, 2}


@both
def test_impossible_tokens_are_never_sampled(kind: str) -> None:
    logits = torch.full((4000, 9), float("-inf"))
    logits[:, [3, 4]] = 0.0
    assert set(draw(kind, logits, rows(4000, seed=2)).tolist()) == {3, 4}


def test_uniforms_are_uniform_and_below_one() -> None:
    values = uniforms(torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300))
    assert float(values.min()) >= 0.0 and float(values.max()) < 1.0
    counts = torch.histc(values.float(), 20, 0, 1)
    assert float(((counts - 4500) ** 2 / 4500).sum()) < 43.8  # 19 degrees of freedom, 0.1 %
