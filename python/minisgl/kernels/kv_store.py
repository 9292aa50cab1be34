"""Storing the K and V of a step's tokens in the KV pool.

Invariants: places of padding rows are written in any order; no other place is written twice.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernels.triton_available import use_triton


def store_kv(pool_k: Tensor, pool_v: Tensor, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
    """k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] to the places out_loc [n] of the pools, which are [places,
    kv_heads, k_dim] and [places, kv_heads, v_dim]."""
    if use_triton(pool_k) and pool_k.shape == pool_v.shape:
        from minisgl.kernels import kv_store_triton

        kv_store_triton.store_kv(pool_k, pool_v, out_loc, k, v)
        return
    places = out_loc.long()
    pool_k.index_copy_(0, places, k)
    pool_v.index_copy_(0, places, v)
