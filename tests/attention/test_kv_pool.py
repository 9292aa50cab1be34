"""The KV pool's memory on a CPU: zeros that take none until they are written."""

from __future__ import annotations

import psutil
import pytest
import torch

from minisgl.attention import KVPool

GIB = 2**30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_pool_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    page = 16 * 8 * 128 * dtype.itemsize
    before = psutil.Process().memory_info().rss
    pool = KVPool(
        num_layers=4,
        num_pages=GIB // (8 * page),
        page_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    assert sum(tensor.nbytes for tensor in (*pool.k, *pool.v)) >= GIB
    out_loc = torch.tensor([0, 17, 5000])
    ones = torch.ones(3, 8, 128, dtype=dtype)
    pool.store(3, out_loc, ones, ones)
    assert pool.k[3].flatten(0, 1)[out_loc].eq(1).all() and not pool.v[3][1, 0].any()
    pool.clear()
    assert not pool.k[3].flatten(0, 1)[out_loc].any()
    assert psutil.Process().memory_info().rss - before < GIB // 4
