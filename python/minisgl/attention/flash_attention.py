"""Attention by the flash-attn package (2.x), for pages of multiples of 256 tokens; decode works under CUDA graphs.

Steps whose rows all have one token go through `flash_attn_with_kvcache`, which takes lengths and page tables on the
device; all others in one call through `flash_attn_varlen_func`.

Invariants: what a graph reads stays at the address that it had when the graph was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.api import AttentionRows
from minisgl.attention.kv_pool import KVPool


class FlashAttention:
    """The flash-attn backend. `windows`: by layer, as for `TorchSdpa`. `graph_sizes`: row counts of decode graphs."""

    graph_obstacle: ClassVar[str] = ""

    def __init__(
        self,
        pool: KVPool,
        device: torch.device,
        windows: Sequence[int | None],
        *,
        max_pages_per_row: int,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen: Any = flash_attn_varlen_func
        self._with_cache: Any = flash_attn_with_kvcache
        self._pool = pool
        self._device = device
        self._windows = [(-1, -1) if window is None else (window - 1, 0) for window in windows]
        self._sizes = frozenset(graph_sizes)
        # graphs use whole rows of the page table, because the length of the longest row changes from step to step
        self._tables = torch.zeros(max(graph_sizes, default=0), max_pages_per_row, dtype=torch.int32, device=device)
        self._decode = False
        self._step: dict[str, Any] = {}
        self._out_loc = torch.empty(0, dtype=torch.int32, device=device)

    def prepare(self, rows: AttentionRows, page_table: Tensor) -> None:
        assert rows.device is not None
        device, count = rows.device, len(rows.slots)
        longest = int(rows.seq_lens.max())
        columns = -(-longest // self._pool.page_size)
        self._out_loc = device.out_loc
        self._decode = rows.num_decode == count
        if self._decode:
            tables = self._tables[:count]
            if count in self._sizes:
                torch.index_select(page_table, 0, device.slots, out=tables)
            else:
                tables = page_table[:, :columns].index_select(0, device.slots)
            self._step = {"cache_seqlens": device.seq_lens, "block_table": tables}
            return
        self._step = {
            "cu_seqlens_q": self._sums(rows.extend_lens),
            "cu_seqlens_k": self._sums(rows.seq_lens),
            "max_seqlen_q": int(rows.extend_lens.max()),
            "max_seqlen_k": longest,
            "block_table": page_table[:, :columns].index_select(0, device.slots),
        }

    def _sums(self, lens: np.typing.NDArray[np.int32]) -> Tensor:
        sums = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return torch.from_numpy(sums).to(self._device, non_blocking=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.store(layer, self._out_loc, k, v)
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        settings = {"causal": True, "window_size": self._windows[layer], **self._step}
        pool_k, pool_v = self._pool.k[layer], self._pool.v[layer]
        if self._decode:
            attended: Tensor = self._with_cache(q.unsqueeze(1), pool_k, pool_v, **settings)
            return attended.squeeze(1)
        together: Tensor = self._varlen(q.contiguous(), pool_k, pool_v, **settings)
        return together
