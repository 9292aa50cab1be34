"""The KV pool's memory on a CPU: zeros that take none until they are written."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from minisgl.attention import KVPool, LayerAttention
from minisgl.attention.kv_pool import page_bytes

GIB = 2**30


def resident_bytes(tensors: list[torch.Tensor]) -> int:
    """What of the tensors' memory is there (mincore): whatever else the process holds does not count."""
    libc = ctypes.CDLL(None, use_errno=True)
    page, pages = mmap.PAGESIZE, 0
    for tensor in tensors:
        first = tensor.data_ptr() // page * page
        count = -(-(tensor.data_ptr() + tensor.nbytes - first) // page)
        seen = (ctypes.c_ubyte * count)()
        if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page), seen) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        pages += sum(byte & 1 for byte in bytes(seen))
    return pages * page


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_pool_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    page = 16 * 8 * 128 * dtype.itemsize
    pool = KVPool(
        [LayerAttention(8, 8, 128, 128)] * 4,
        num_pages=GIB // (8 * page),
        page_size=16,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    tensors = [*pool.k, *pool.v]
    assert sum(tensor.nbytes for tensor in tensors) >= GIB
    out_loc = torch.tensor([0, 17, 5000])
    ones = torch.ones(3, 8, 128, dtype=dtype)
    pool.store(3, out_loc, ones, ones)
    assert pool.k[3].flatten(0, 1)[out_loc].eq(1).all() and not pool.v[3][1, 0].any()
    pool.clear()
    assert not pool.k[3].flatten(0, 1)[out_loc].any()
    assert 0 < resident_bytes(tensors) < GIB // 16


def test_layers_need_not_be_alike() -> None:
    layers = [LayerAttention(8, 2, 16, 16), LayerAttention(8, 4, 24, 8)]
    device = torch.device("cpu")
    pool = KVPool(layers, num_pages=5, page_size=4, dtype=torch.bfloat16, device=device)
    assert [tensor.shape[1:] for tensor in (*pool.k, *pool.v)] == [(4, 2, 16), (4, 4, 24), (4, 2, 16), (4, 4, 8)]
    held = sum(tensor[:5].nbytes for tensor in (*pool.k, *pool.v))
    assert held == 5 * page_bytes(layers, 4, torch.bfloat16)
    places = torch.tensor([3, 11])
    k, v = torch.randn(2, 4, 24, dtype=torch.bfloat16), torch.randn(2, 4, 8, dtype=torch.bfloat16)
    pool.store(1, places, k, v)
    assert torch.equal(pool.k[1].flatten(0, 1)[places], k) and torch.equal(pool.v[1].flatten(0, 1)[places], v)
