"""`benchmark.quality` sums the distance of logits from a reference, and reads the logits that llama.cpp writes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark.quality import CHUNK, HALF, Compared, written_by
from minisgl.config import ConfigError


def test_figures_of_two_positions() -> None:
    expected = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).double().log()
    found = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
    sums = Compared()
    sums.add(expected, found, torch.tensor([1, 0]))
    figures = sums.figures()
    kl = 0.75 * math.log(3) - 0.25 * math.log(3)
    assert figures["mean_kl"] == pytest.approx(kl / 2) and figures["max_kl"] == pytest.approx(kl)
    assert figures["top1"] == 0.5 and figures["ties"] == 0.5
    assert figures["mean_dlogprob"] == pytest.approx(math.log(3) / 2)
    assert figures["max_dlogprob"] == pytest.approx(math.log(3))
    assert figures["perplexity"] == pytest.approx(math.sqrt(2 * 4))
    assert figures["perplexity_ratio"] == pytest.approx(math.sqrt(3))


def test_a_probability_that_is_unknown_is_left_out_of_the_kl() -> None:
    expected = torch.tensor([[0.5, 0.25, 0.25]]).double().log()
    sums = Compared()
    sums.add(expected, torch.tensor([[0.25, 0.5, 0.0]]).double().log(), torch.tensor([2]))
    figures = sums.figures()
    assert figures["mean_kl"] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert figures["perplexity"] == pytest.approx(4) and figures["mean_dlogprob"] == pytest.approx(0)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for `llama-perplexity`: its output is the file that lies ready."""
    monkeypatch.setattr("benchmark.quality.text", lambda: "a text")
    script = tmp_path / "llama-perplexity"
    script.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\ncp "$(dirname "$0")/ready" "$1"\n')
    script.chmod(0o755)
    return script


def test_log_probabilities_that_llama_cpp_wrote(program: Path, tmp_path: Path) -> None:
    """The file has the sizes, all tokens, and for each position a scale, the least and 16 bits a token."""
    chunks, vocab = np.arange(2 * CHUNK, dtype=np.int32).reshape(2, CHUNK), 3
    rows = np.zeros((2, CHUNK - 1 - HALF, 4 + 4), np.uint16)
    rows[:, :, :4] = np.array([0.25, -9.0], np.float32).view(np.uint16)
    rows[:, :, 4:7] = (4, 0, 36)
    rows[1, 0, 4:7] = (8, 0, 16)
    sizes = np.array([CHUNK, vocab, len(chunks)], np.int32)
    (tmp_path / "ready").write_bytes(b"_logits_" + sizes.tobytes() + chunks.tobytes() + rows.tobytes())
    chunks[:, 0] = 7  # the token that begins every chunk is not in the file
    logits = written_by(program, Path("a.gguf"), chunks, 2, tmp_path / "out")
    expected = torch.tensor([[-8.0, -torch.inf, 0.0]] * (CHUNK - 1 - HALF)).double()
    assert torch.equal(logits(chunks[0].tolist()), expected)
    expected[0] = torch.tensor([-7.0, -torch.inf, -5.0])
    assert torch.equal(logits(chunks[1].tolist()), expected)
    chunks[1, 5] = 3
    with pytest.raises(ConfigError, match="other tokens"):
        written_by(program, Path("a.gguf"), chunks, 2, tmp_path / "out")


def test_a_run_of_llama_cpp_that_fails_is_named(program: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exit code 1: .*ready"):
        written_by(program, Path("a.gguf"), np.zeros((1, CHUNK), np.int32), 2, tmp_path / "out")
