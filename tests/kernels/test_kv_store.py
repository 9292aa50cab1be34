"""Storing keys and values in torch, against plain Python; `test_pages` runs the Triton kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kernels import kv_store

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
    check_store(kv_store, seed)
