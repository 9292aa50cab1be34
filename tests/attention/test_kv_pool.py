"""The KV pool's memory on a CPU: zeros that take none until they are written."""

from __future__ import annotations

import psutil
import pytest
import torch

from minisgl.attention import KVPool, LayerAttention
from minisgl.attention.kv_pool import page_bytes

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


def test_layers_need_not_be_alike() -> None:
    layers = [LayerAttention(8, 2, 16, 16), LayerAttention(8, 4, 24, 8)]
    device = torch.device("cpu")
    pool = KVPool.of(layers, num_pages=5, page_size=4, dtype=torch.bfloat16, device=device)
    assert [tensor.shape[1:] for tensor in (*pool.k, *pool.v)] == [(4, 2, 16), (4, 4, 24), (4, 2, 16), (4, 4, 8)]
    held = sum(tensor[:5].nbytes for tensor in (*pool.k, *pool.v))
    assert held == 5 * page_bytes(layers, 4, torch.bfloat16)
    places = torch.tensor([3, 11])
    k, v = torch.randn(2, 4, 24, dtype=torch.bfloat16), torch.randn(2, 4, 8, dtype=torch.bfloat16)
    pool.store(1, places, k, v)
    assert torch.equal(pool.k[1].flatten(0, 1)[places], k) and torch.equal(pool.v[1].flatten(0, 1)[places], v)
