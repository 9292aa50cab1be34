"""Storing keys and values in torch, against plain Python; `test_pages` runs the Triton kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kernels import ops
from tests.helpers.triton import interpreted

EXAMPLES = settings(max_examples=60, deadline=None)


def check_store(module: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, heads, dim = int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.choice([3, 8, 24]))
    merged = torch.from_numpy(rng.standard_normal((tokens, 2 * heads + 1, dim)).astype(np.float32))
    k, v = merged[:, :heads], merged[:, heads : 2 * heads]
    pools = [torch.zeros(20, heads, dim), torch.zeros(20, heads, dim)]
    expected = [pool.clone() for pool in pools]
    places = torch.from_numpy(rng.permutation(20)[:tokens].astype(np.int32))
    for token, place in enumerate(places.tolist()):
        expected[0][place], expected[1][place] = k[token], v[token]
    module.store_kv(*pools, places, k, v)
    assert all(map(torch.equal, pools, expected))


@EXAMPLES
@given(st.integers(0, 2**32))
def test_kv_store_in_torch(seed: int) -> None:
    check_store(ops, seed)


def table_case(seed: int) -> dict[str, Any]:
    """A table, changes of distinct slots, and rows to gather; with what plain Python makes of them."""
    rng = np.random.default_rng(seed)
    slots, columns = int(rng.integers(1, 9)), int(rng.integers(1, 600))
    table = rng.integers(0, 1000, (slots, columns)).astype(np.int32)
    updates, page_ids, expected = [], [], table.copy()
    for slot in rng.permutation(slots)[: int(rng.integers(0, slots + 1))].tolist():
        first = int(rng.integers(0, columns))
        count = int(rng.integers(0, columns - first + 1))
        new = rng.integers(1000, 2000, count).tolist()
        updates.append((slot, first, count, len(page_ids)))
        for i, page in enumerate(new):
            expected[slot, first + i] = page
        page_ids += new
    rows = rng.integers(0, slots, int(rng.integers(0, 7))).astype(np.int32)
    counts = rng.integers(0, columns + 1, len(rows))
    gathered = [int(p) for slot, count in zip(rows, counts, strict=True) for p in expected[slot, :count]]
    return {
        "table": torch.from_numpy(table),
        "updates": torch.tensor(updates, dtype=torch.int32).reshape(-1, 4),
        "page_ids": torch.tensor(page_ids, dtype=torch.int32),
        "expected": torch.from_numpy(expected),
        "slots": torch.from_numpy(rows),
        "indptr": torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        "gathered": torch.tensor(gathered, dtype=torch.int32),
    }


def check_tables(module: Any, seed: int) -> None:
    case = table_case(seed)
    if len(case["updates"]):
        module.apply_updates(case["table"], case["updates"], case["page_ids"])
    assert torch.equal(case["table"], case["expected"])
    out = torch.full_like(case["gathered"], -1)
    if len(case["slots"]):
        module.gather_pages(case["table"], case["slots"], case["indptr"], out)
    assert torch.equal(out, case["gathered"])


@EXAMPLES
@given(st.integers(0, 2**32))
def test_page_table_in_torch_is_that_of_plain_python(seed: int) -> None:
    check_tables(ops, seed)


@pytest.mark.slow
def test_triton_kernels_do_the_same_in_the_interpreter() -> None:
    program = (
        "from minisgl.kernels import ops_triton\n"
        "from tests.kernels.test_ops import check_store\n"
        "from tests.kernels.test_ops import check_tables\n"
        "for seed in range(25): check_tables(ops_triton, seed); check_store(ops_triton, seed)\n"
        "print('same')"
    )
    assert interpreted(program) == "same\n"


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
    check_mask(ops, seed)


@pytest.mark.slow
def test_the_triton_kernel_does_the_same_in_the_interpreter() -> None:
    program = (
        "from minisgl.kernels import ops_triton\n"
        "from tests.kernels.test_ops import check_mask\n"
        "for seed in range(25): check_mask(ops_triton, seed)\n"
        "print('same')"
    )
    assert interpreted(program) == "same\n"
