"""How far logits are from others: the sums are right."""

from __future__ import annotations

import math

import pytest
import torch

from benchmark.quality import Compared


def test_figures_of_two_positions() -> None:
    expected = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    found = torch.tensor([[0.0, 0.0], [0.0, math.log(3)]])
    sums = Compared()
    sums.add(expected, found, [0, 1])
    figures = sums.figures()
    kl = 0.75 * math.log(3) - 0.25 * math.log(3)
    assert figures["mean_kl"] == pytest.approx(kl / 2) and figures["max_kl"] == pytest.approx(kl)
    assert figures["top1"] == 0.5 and figures["ties"] == 0.5
    assert figures["mean_dlogprob"] == pytest.approx(0) and figures["perplexity_ratio"] == pytest.approx(1)
    assert figures["max_dlogprob"] == pytest.approx(math.log(3))
