"""Ids that may not come, in torch and in Triton's interpreter, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kernels import token_mask
from tests.helpers.triton import interpreted

EXAMPLES = settings(max_examples=60, deadline=None)


def check_mask(module: Any, seed: int) -> None:
    """Also what lies beside the logits, and the bits behind the vocabulary, whatever they are."""
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.integers(1, 7)), int(rng.choice([1, 31, 32, 33, 60, 1024, 1025, 2100]))
    whole = torch.from_numpy(rng.standard_normal((rows, vocab + int(rng.integers(0, 5)))).astype(np.float32))
    expected = whole.clone()
    masked = np.sort(rng.permutation(rows)[: int(rng.integers(1, rows + 1))]).astype(np.int32)
    words = -(-vocab // 32)
    kind = int(rng.integers(0, 3))  # any, none may come, all may
    bits = rng.integers(-(2**31), 2**31, (len(masked), words)).astype(np.int32)
    if kind:
        bits[:] = -1 if kind == 2 else 0
    for at, row in enumerate(masked.tolist()):
        for i in range(vocab):
            if not int(bits[at, i // 32]) >> i % 32 & 1:
                expected[row, i] = float("-inf")
    module.mask_tokens(whole[:, :vocab], torch.from_numpy(masked), torch.from_numpy(bits))
    assert torch.equal(whole, expected)


@EXAMPLES
@given(st.integers(0, 2**32))
def test_in_torch_it_is_that_of_plain_python(seed: int) -> None:
    check_mask(token_mask, seed)


@pytest.mark.slow
def test_the_triton_kernel_does_the_same_in_the_interpreter() -> None:
    program = (
        "from minisgl.kernels import token_mask_triton\n"
        "from tests.kernels.test_token_mask import check_mask\n"
        "for seed in range(25): check_mask(token_mask_triton, seed)\n"
        "print('same')"
    )
    assert interpreted(program) == "same\n"
