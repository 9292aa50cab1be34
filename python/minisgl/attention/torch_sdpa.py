"""Attention with torch's own scaled_dot_product_attention: always installed, and the reference for other backends.

Decode rows are grouped by length and computed a few rows at a time: their pages are gathered into a scratch buffer,
then one call attends, with the query heads of a KV head folded into the query length. Prefill rows are computed one by
one. Layers with a window read only its pages.

Invariants: only the pages of the step's rows are read; tokens before the window have no effect; the scratch buffer is
as large as one row needs, or `SCRATCH_BYTES`. (Fresh memory for every gather costs as much again, in page faults.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.attention.api import AttentionRows, LayerAttention
from minisgl.attention.kv_pool import KVPool
from minisgl.attention.scores import Products

_Int64Array = npt.NDArray[np.int64]
SCRATCH_BYTES = 8 * 2**20  # for K, and for V


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    rows: Tensor | None  # [g] int64 indexes of decode rows; None: all of them, in order
    pages: Tensor  # [g * columns] int64
    columns: int  # pages to read per row
    length: int  # number of keys; up to columns * page_size
    mask: Tensor | None  # [g, 1, 1, length]; None if every row has that length
    gathers: dict[tuple[int, int, int, bool], list[_Gather]]
    """Gathers by (KV heads, k_dim, v_dim, separate heads), created when a layer needs them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """Gathered K and V for some rows of a group, valid in the scratch buffer until the next gather of any layer."""

    rows: slice
    places: Tensor  # pages; with separate heads, the keys of one head after the other
    k: Tensor  # [places, values per place]
    v: Tensor
    k_heads: Tensor  # view of k as [rows, kv_heads, length, k_dim]
    v_heads: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillRow:
    start: int  # range of its tokens
    end: int
    pages: Tensor
    length: int  # number of keys
    mask: Tensor | None  # [tokens, length]; None if the row has no history: plain causal


@dataclass(frozen=True, slots=True, eq=False)
class _Reads:
    """KV reads of a step, shared by the layers with the same window: groups of decode rows, and prefill rows."""

    groups: list[_DecodeGroup]
    prefill: list[_PrefillRow]


class TorchSdpa:
    """The SDPA backend. `windows`, `scales` and `softcaps`: by layer, as in `LayerAttention`; None by default."""

    graph_obstacle: ClassVar[str] = "the rows' lengths, which the host knows, decide the sizes of what it gathers"
    fused: ClassVar[bool] = True

    def __init__(
        self,
        pool: KVPool,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
        *,
        scales: Sequence[float | None] | None = None,
        softcaps: Sequence[float | None] | None = None,
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._device = device
        self._out_loc = torch.empty(0, dtype=torch.int64)
        self._num_decode = 0
        nowhere = (None,) * len(pool.k)
        self._windows = nowhere if windows is None else tuple(windows)
        scores = zip(nowhere if scales is None else scales, nowhere if softcaps is None else softcaps, strict=True)
        self._products = [Products(scale, softcap, self.fused) for scale, softcap in scores]
        self._reads: dict[int | None, _Reads] = {}  # by window
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in "kv"]

    @classmethod
    def of(cls, layers: Sequence[LayerAttention], pool: KVPool) -> TorchSdpa:
        """Create the backend for the attention layers of a model."""
        return cls(
            pool,
            pool.k[0].dtype,
            pool.k[0].device,
            [layer.window for layer in layers],
            scales=[layer.scale for layer in layers],
            softcaps=[layer.softcap for layer in layers],
        )

    def prepare(self, rows: AttentionRows, page_table: Tensor) -> None:
        self._out_loc = torch.from_numpy(rows.out_loc.astype(np.int64)).to(self._device)
        self._num_decode = rows.num_decode
        longest = int(rows.seq_lens.max())
        self._reads = {}
        by_need: dict[int | None, _Reads] = {}  # a window that is longer than every row has no effect
        for window in set(self._windows):
            need = None if window is None or window >= longest else window
            if need not in by_need:
                by_need[need] = self._read(rows, page_table, need)
            self._reads[window] = by_need[need]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.store(layer, self._out_loc, k, v)
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        reads = self._reads[self._windows[layer]]
        if not reads.prefill and len(reads.groups) == 1:
            return self._decode(reads.groups[0], q, layer)
        out = q.new_empty(*q.shape[:2], self._pool.v[layer].shape[3])
        for group in reads.groups:
            assert group.rows is not None or len(reads.groups) == 1
            if group.rows is None:
                out[: self._num_decode] = self._decode(group, q[: self._num_decode], layer)
            else:
                out[group.rows] = self._decode(group, q[group.rows], layer)
        for row in reads.prefill:
            out[row.start : row.end] = self._extend(row, q[row.start : row.end], layer)
        return out

    def _read(self, rows: AttentionRows, page_table: Tensor, window: int | None) -> _Reads:
        reads = _Reads(self._decode_groups(rows, page_table, window) if rows.num_decode else [], [])
        start = rows.num_decode
        for row in range(rows.num_decode, len(rows.slots)):
            end = start + int(rows.extend_lens[row])
            reads.prefill.append(self._prefill_row(rows, row, start, end, page_table, window))
            start = end
        return reads

    # ------------------------------------------------------------------------------------------------------ decode

    def _decode_groups(self, rows: AttentionRows, page_table: Tensor, window: int | None) -> list[_DecodeGroup]:
        """Group rows whose page counts have the same power of two, so that padding at most doubles the reads."""
        lens = rows.seq_lens[: rows.num_decode].astype(np.int64)
        slots = rows.slots[: rows.num_decode].astype(np.int64)
        first = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // self._pool.page_size
        columns = -(-lens // self._pool.page_size) - first
        if int(columns.max()) <= 2 * int(columns.min()):
            return [self._decode_group(None, lens, first, int(columns.max()), slots, page_table, window)]
        keys = np.ceil(np.log2(columns))
        groups = []
        for key in np.unique(keys):
            at = np.flatnonzero(keys == key)
            widest = int(columns[at].max())
            groups.append(self._decode_group(at, lens[at], first[at], widest, slots[at], page_table, window))
        return groups

    def _decode_group(
        self,
        chosen: _Int64Array | None,
        lens: _Int64Array,
        first: _Int64Array,
        columns: int,
        slots: _Int64Array,
        page_table: Tensor,
        window: int | None,
    ) -> _DecodeGroup:
        """Return a group of decode rows, each reading `columns` pages from page index `first` on."""
        slots_device = torch.from_numpy(slots).to(self._device)
        if window is None:
            pages = page_table[slots_device, :columns]
        else:  # a row near its end of the table reads a page twice; the mask hides the second
            wanted = np.minimum(first[:, None] + np.arange(columns), page_table.shape[1] - 1)
            pages = page_table[slots_device[:, None], torch.from_numpy(wanted).to(self._device)]
        page_size = self._pool.page_size
        # bf16 on a CPU goes through oneDNN, which compiles a kernel for each length: multiples of pages are fewer
        exact = self._dtype is torch.float32
        mask, length = None, int((lens - first * page_size).max()) if exact else columns * page_size
        if window is not None or int(lens.min()) < length:
            positions = (first * page_size)[:, None] + np.arange(length)
            hidden = positions >= lens[:, None]
            if window is not None:
                hidden |= positions < lens[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype)
            mask[torch.from_numpy(hidden)] = float("-inf")
            mask = mask[:, None, None, :].to(self._device)
        rows = None if chosen is None else torch.from_numpy(chosen).to(self._device)
        return _DecodeGroup(rows, pages.flatten(), columns, length, mask, {})

    def _decode(self, group: _DecodeGroup, q: Tensor, layer: int) -> Tensor:
        pool_k, pool_v = self._pool.k[layer], self._pool.v[layer]
        num_rows, heads, dim = q.shape
        kv_heads = pool_k.shape[2]
        folded = q.reshape(num_rows, kv_heads, heads // kv_heads, dim)
        shape = (kv_heads, dim, pool_v.shape[3], self._products[layer].needs_separate_heads(self._dtype))
        if (gathers := group.gathers.get(shape)) is None:
            gathers = group.gathers[shape] = self._gathers(group, num_rows, *shape)
        parts = []
        for gather in gathers:
            torch.index_select(pool_k.view(-1, gather.k.shape[1]), 0, gather.places, out=gather.k)
            torch.index_select(pool_v.view(-1, gather.v.shape[1]), 0, gather.places, out=gather.v)
            q_rows = folded if len(gathers) == 1 else folded[gather.rows]
            parts.append(self._products[layer].attend(q_rows, gather.k_heads, gather.v_heads, gather.mask))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(num_rows, heads, -1)

    def _gathers(
        self, group: _DecodeGroup, num_rows: int, kv_heads: int, k_dim: int, v_dim: int, apart: bool
    ) -> list[_Gather]:
        """Return gathers of as many rows as the scratch buffer holds, shared by the layers with these heads."""
        columns, values = group.columns, self._pool.page_size * kv_heads
        per_row = columns * values * max(k_dim, v_dim) * self._dtype.itemsize
        at_once = min(num_rows, max(1, SCRATCH_BYTES // per_row))
        for which, dim in enumerate((k_dim, v_dim)):
            needed = at_once * columns * values * dim
            if len(self._scratch[which]) < needed:
                self._scratch[which] = self._scratch[which].new_empty(needed)
        gathers = []
        for start in range(0, num_rows, at_once):
            rows = slice(start, min(start + at_once, num_rows))
            count = rows.stop - start
            places = group.pages[rows.start * columns : rows.stop * columns]
            if apart:
                places = self._heads_apart(places.view(count, columns), kv_heads, group.length)
            of_one = 1 if apart else values
            k, v = (
                scratch[: len(places) * of_one * dim].view(len(places), of_one * dim)
                for scratch, dim in zip(self._scratch, (k_dim, v_dim), strict=True)
            )
            k_heads, v_heads = (
                gathered.view(count, kv_heads, group.length, dim)
                if apart
                else gathered.view(count, -1, kv_heads, dim)[:, : group.length].transpose(1, 2)
                for gathered, dim in ((k, k_dim), (v, v_dim))
            )
            mask = None if group.mask is None else group.mask[rows]
            gathers.append(_Gather(rows, places, k, v, k_heads, v_heads, mask))
        return gathers

    def _heads_apart(self, pages: Tensor, kv_heads: int, length: int) -> Tensor:
        """Return the pool index of each key of each head, [rows * kv_heads * length], for pages [rows, columns]."""
        size = self._pool.page_size
        keys = (pages[:, :, None] * size + torch.arange(size, device=self._device)).flatten(1)[:, None, :length]
        return (keys * kv_heads + torch.arange(kv_heads, device=self._device)[:, None]).flatten()

    # ----------------------------------------------------------------------------------------------------- prefill

    def _prefill_row(
        self, rows: AttentionRows, row: int, start: int, end: int, page_table: Tensor, window: int | None
    ) -> _PrefillRow:
        seq_len, num_tokens = int(rows.seq_lens[row]), end - start
        page_size = self._pool.page_size
        first = 0 if window is None else max(seq_len - num_tokens + 1 - window, 0) // page_size
        mask = None
        if seq_len > num_tokens or (window is not None and seq_len > window):
            keys = torch.arange(first * page_size, seq_len, device=self._device)[None, :]
            last = torch.arange(seq_len - num_tokens, seq_len, device=self._device)[:, None]
            mask = keys <= last
            if window is not None:
                mask &= keys > last - window
        pages = page_table[int(rows.slots[row]), first : -(-seq_len // page_size)]
        return _PrefillRow(start, end, pages, seq_len - first * page_size, mask)

    def _extend(self, row: _PrefillRow, q: Tensor, layer: int) -> Tensor:
        """Compute attention of one prefill row: q [n, heads, k_dim] -> [n, heads, v_dim]."""
        pool_k, pool_v = self._pool.k[layer], self._pool.v[layer]
        k = pool_k.index_select(0, row.pages).flatten(0, 1)[: row.length].transpose(0, 1)
        v = pool_v.index_select(0, row.pages).flatten(0, 1)[: row.length].transpose(0, 1)
        out = self._products[layer].extend(q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), row.mask)
        return out.squeeze(0).transpose(0, 1)


class Eager(TorchSdpa):
    """Attention step by step, to debug a fused kernel: scores, softmax, weighted sum, each a torch call."""

    fused: ClassVar[bool] = False
