"""A pair of backends over one KV pool: one for rows of several tokens, one for rows of one token.

Invariants: all rows of a step store before any row reads; steps of one-token rows, and graphs, are the second's alone.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minisgl.attention.api import AttentionBackend, AttentionRows, DeviceRows
from minisgl.attention.kv_pool import KVPool


class Pair:
    """A backend that delegates to `prefill` and `decode`, both made for `pool`."""

    graph_obstacle: ClassVar[str] = "graphs are those of the backend that decodes"

    def __init__(self, pool: KVPool, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._pool = pool
        self._prefill = prefill
        self._decode = decode
        self._num_decode = 0
        self._alone: AttentionBackend | None = None  # backend of all rows of this step; None: both
        self._out_loc = torch.empty(0, dtype=torch.int32)

    def prepare(self, rows: AttentionRows, page_table: Tensor) -> None:
        self._num_decode = rows.num_decode
        self._alone = None
        if rows.num_decode == len(rows.slots):
            self._alone = self._decode
        elif not rows.num_decode:
            self._alone = self._prefill
        if self._alone is not None:
            self._alone.prepare(rows, page_table)
            return
        assert rows.device is not None
        self._out_loc = rows.device.out_loc
        self._decode.prepare(_part(rows, decode=True), page_table)
        self._prefill.prepare(_part(rows, decode=False), page_table)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._alone is not None:
            return self._alone.attend(layer, q, k, v)
        self._pool.store(layer, self._out_loc, k, v)
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        if self._alone is not None:
            return self._alone.read(layer, q)
        first = self._num_decode  # decode rows have one token each
        return torch.cat((self._decode.read(layer, q[:first]), self._prefill.read(layer, q[first:])))


def _part(rows: AttentionRows, *, decode: bool) -> AttentionRows:
    """Return the decode rows of a mixed step, or its other rows."""
    device, count = rows.device, rows.num_decode
    assert device is not None
    part = slice(count) if decode else slice(count, None)  # of rows and of tokens: decode rows have one each
    sums = device.kv_indptr[: count + 1] if decode else device.kv_indptr[count:] - device.kv_indptr[count]
    return AttentionRows(
        num_decode=count if decode else 0,
        slots=rows.slots[part],
        seq_lens=rows.seq_lens[part],
        extend_lens=rows.extend_lens[part],
        out_loc=rows.out_loc[part],
        device=DeviceRows(device.slots[part], device.seq_lens[part], sums, device.out_loc[part]),
    )
