"""Page tables on a device: updates and gathering, in torch and in Triton's interpreter, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kernels import pages
from tests.helpers.triton import interpreted

EXAMPLES = settings(max_examples=60, deadline=None)


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
    check_tables(pages, seed)


@pytest.mark.slow
def test_triton_kernels_do_the_same_in_the_interpreter() -> None:
    program = (
        "from minisgl.kernels import kv_store_triton, pages_triton\n"
        "from tests.kernels.test_kv_store import check_store\n"
        "from tests.kernels.test_pages import check_tables\n"
        "for seed in range(25): check_tables(pages_triton, seed); check_store(kv_store_triton, seed)\n"
        "print('same')"
    )
    assert interpreted(program) == "same\n"
