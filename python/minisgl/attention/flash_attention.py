"""Attention by the flash-attn package, for pages of multiples of 256 tokens. Not under CUDA graphs.

Keeps true: all rows of a step go in one call a layer.
Doesn't know: how rows were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.api import AttentionRows
from minisgl.attention.kv_pool import KVPool


class FlashAttention:
    """`windows`, by layer, as for `TorchSdpa`."""

    def __init__(self, pool: KVPool, device: torch.device, windows: Sequence[int | None]) -> None:
        from flash_attn import flash_attn_varlen_func

        self._attention: Any = flash_attn_varlen_func
        self._pool = pool
        self._device = device
        self._windows = [(-1, -1) if window is None else (window - 1, 0) for window in windows]
        self._step: dict[str, Any] = {}
        self._out_loc = torch.empty(0, dtype=torch.int32, device=device)

    def prepare(self, rows: AttentionRows, page_table: Tensor) -> None:
        assert rows.there is not None
        longest = int(rows.seq_lens.max())
        columns = -(-longest // self._pool.page_size)
        self._out_loc = rows.there.out_loc
        self._step = {
            "cu_seqlens_q": self._sums(rows.extend_lens),
            "cu_seqlens_k": self._sums(rows.seq_lens),
            "max_seqlen_q": int(rows.extend_lens.max()),
            "max_seqlen_k": longest,
            "block_table": page_table[rows.there.slots.long(), :columns].contiguous(),
            "causal": True,
        }

    def _sums(self, lens: np.typing.NDArray[np.int32]) -> Tensor:
        sums = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return torch.from_numpy(sums).to(self._device, non_blocking=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.store(layer, self._out_loc, k, v)
        attended: Tensor = self._attention(
            q.contiguous(), self._pool.k[layer], self._pool.v[layer], window_size=self._windows[layer], **self._step
        )
        return attended
