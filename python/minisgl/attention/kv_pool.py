"""The KV pool: tensors of K and V for each layer and page.

Invariants: a slot of the pool holds finite values from the start, because masked positions are read, too. A page with
values that are not finite is zeroed before a row reuses it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.attention.api import Int32Array, LayerAttention
from minisgl.kernels.ops import store_kv


class KVPool:
    """K and V of `num_pages` pages and one for padding rows. A CPU allocates memory only when it is written."""

    def __init__(
        self,
        layers: Sequence[LayerAttention],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self._invalid: set[int] = set()
        pages = num_pages + 1, page_size
        self.k = [_zeros((*pages, layer.kv_heads, layer.k_dim), dtype, device) for layer in layers]
        self.v = [_zeros((*pages, layer.kv_heads, layer.v_dim), dtype, device) for layer in layers]

    def store(self, layer: int, out_loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] at the pool slots out_loc [n], int32 or int64."""
        store_kv(self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1), out_loc, k, v)

    def mark_invalid_rows(self, page_table: Tensor, slots: Int32Array) -> None:
        """Mark the pages of these slots as invalid: some of their values are not finite. They are zeroed when
        `take_invalid_pages` returns them. (Pages beyond a row's length are marked in vain.)"""
        self._invalid.update(page_table[torch.from_numpy(slots).long().to(page_table.device)].unique().tolist())

    def take_invalid_pages(self, out_loc: Int32Array) -> list[int]:
        """Return and unmark the invalid pages that a forward with these `out_loc` begins; zero them before it."""
        if not self._invalid:
            return []
        begun = out_loc[out_loc % self.page_size == 0] // self.page_size
        invalid = self._invalid.intersection(begun.tolist())
        self._invalid -= invalid
        return sorted(invalid)

    def clear_pages(self, pages: list[int]) -> None:
        for tensor in (*self.k, *self.v):
            tensor[pages] = 0

    def clear(self) -> None:
        """Zero the pool, after a forward that may have stored NaN."""
        self._invalid.clear()
        for tensors in (self.k, self.v):
            for layer, tensor in enumerate(tensors):
                if tensor.device.type == "cpu":  # frees the memory
                    tensors[layer] = _zeros(tuple(tensor.shape), tensor.dtype, tensor.device)
                else:  # graphs use this address
                    tensor.zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU, memory straight from the system is zero at first use, so unused pages cost nothing.
    (torch writes zeros; an allocator, numpy's too, may reuse freed memory, and writes zeros there.)"""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def page_bytes(layers: Sequence[LayerAttention], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all layers."""
    return page_size * dtype.itemsize * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in layers)
