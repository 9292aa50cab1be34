"""The KV tensors: for each layer K and V of every page.

Keeps true: a slot of the pool holds finite numbers from the start, because masked positions are read, too.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from minisgl.kernels.kv_store import store_kv


class KVPool:
    """`num_pages` pages and one more for padding rows. On a CPU memory is taken only when it is written."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self.k = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def store(self, layer: int, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [n, kv_heads, d] to places out_loc [n] int32 or int64."""
        store_kv(self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1), out_loc, k, v)

    def clear(self) -> None:
        """Back to zeros, after a forward that may have stored NaN."""
        for tensors in (self.k, self.v):
            for layer, tensor in enumerate(tensors):
                if tensor.device.type == "cpu":  # gives the memory back
                    tensors[layer] = _zeros(tuple(tensor.shape), tensor.dtype, tensor.device)
                else:  # graphs have its address
                    tensor.zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch writes zeros; numpy gets memory from the system that is zero at first use, so unused pages cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
