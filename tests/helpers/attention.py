"""Random steps for attention backends, on any device, and the reference results of torch in float32.

A step's arrays on the device are at the same addresses in every step, as in an engine; a step's pages are its own; both
pools hold the same values before a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttentionRows, KVPool, TorchSdpa
from minisgl.attention.api import DeviceRows, LayerAttention
from minisgl.attention.flashinfer import Heads
from minisgl.engine.graphs import Capture, Outputs

PEAKED = 3.0  # queries are as long as this, so that a token that is missed shows
Step = tuple[AttentionRows, Tensor]


class Rig:
    def __init__(
        self,
        device: torch.device,
        heads: Heads,
        dtype: torch.dtype,
        *,
        windows: Sequence[int | None] = (None,),
        page_size: int = 16,
        columns: int = 8,
        max_rows: int = 8,
        seed: int = 0,
    ) -> None:
        self.heads, self.dtype, self.device, self.windows = heads, dtype, device, tuple(windows)
        self.page_size, self.columns, self.max_rows = page_size, columns, max_rows
        self._rng = np.random.default_rng(seed)
        self._noise = torch.Generator(device).manual_seed(seed)
        self.pool, self.reference = self._pool(dtype), self._pool(torch.float32)
        self._sdpa = TorchSdpa(self.reference, torch.float32, device, self.windows)
        longest = max_rows * (columns * page_size + 1)
        self._block = torch.zeros(4, longest, dtype=torch.int32, device=device)

    def _pool(self, dtype: torch.dtype) -> KVPool:
        made = KVPool(
            [LayerAttention(self.heads.query, self.heads.kv, self.heads.dim, self.heads.dim)] * len(self.windows),
            num_pages=self.max_rows * self.columns,
            page_size=self.page_size,
            dtype=dtype,
            device=self.device,
        )
        noise = torch.Generator(self.device).manual_seed(1)  # the same for both pools, as exact as `dtype` is
        for tensor in (*made.k, *made.v):
            tensor.copy_(torch.randn(tensor.shape, generator=noise, device=self.device).to(self.dtype))
        return made

    def step(self, num_decode: int, num_prefill: int, at_least: int = 1, at_most: int | None = None) -> Step:
        """Return a random step of rows with at least `at_least` tokens; slots and pages are shuffled."""
        rng, rows = self._rng, num_decode + num_prefill
        pages = rng.permutation(self.max_rows * self.columns).reshape(self.max_rows, self.columns).astype(np.int32)
        slots = rng.permutation(self.max_rows)[:rows].astype(np.int32)
        seq_lens = rng.integers(at_least, (at_most or self.page_size * self.columns) + 1, rows).astype(np.int32)
        extend_lens = np.ones(rows, np.int32)
        for row in range(num_decode, rows):
            extend_lens[row] = rng.integers(1, seq_lens[row] + 1)
        positions = [np.arange(end - new, end) for end, new in zip(seq_lens, extend_lens, strict=True)]
        places = [pages[slot, at // self.page_size] * self.page_size + at % self.page_size
                  for slot, at in zip(slots, positions, strict=True)]  # fmt: skip
        out_loc = np.concatenate(places).astype(np.int32)
        indptr = np.concatenate([[0], np.cumsum(-(-seq_lens // self.page_size))]).astype(np.int32)
        views = []
        for line, values in zip(self._block, (slots, seq_lens, indptr, out_loc), strict=True):
            views.append(line[: len(values)].copy_(torch.from_numpy(values)))
        rows_of_step = AttentionRows(num_decode, slots, seq_lens, extend_lens, out_loc, DeviceRows(*views))
        return rows_of_step, torch.from_numpy(pages).to(self.device)

    def qkv(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return random q, k and v as views of one tensor, as a merged projection produces them."""
        heads = self.heads
        shape = (num_tokens, heads.query + 2 * heads.kv, heads.dim)
        merged = torch.randn(shape, generator=self._noise, device=self.device)
        merged[:, : heads.query] *= PEAKED
        q, k, v = merged.to(self.dtype).split((heads.query, heads.kv, heads.kv), 1)
        return q, k, v

    def check(self, ours: AttentionBackend, step: Step, within: float) -> None:
        """Check every layer's result, and what it stored, against torch."""
        rows, table = step
        ours.prepare(rows, table)
        self._sdpa.prepare(rows, table)
        for layer in range(len(self.windows)):
            q, k, v = self.qkv(len(rows.out_loc))
            got = ours.attend(layer, q, k, v)
            assert got.dtype == self.dtype and got.shape == q.shape
            self._alike(got, self._sdpa.attend(layer, q.float(), k.float(), v.float()), within)
        for mine, theirs in zip((*self.pool.k, *self.pool.v), (*self.reference.k, *self.reference.v), strict=True):
            assert torch.equal(mine.float(), theirs), "what is stored"

    def check_graph(
        self, ours: AttentionBackend, capture: Capture, size: int, within: float, lengths: Sequence[tuple[int, int]]
    ) -> None:
        """Capture a graph on the first step, replay it on a step of each of `lengths` (min, max), and check against
        torch."""
        q, k, v = (torch.zeros_like(part, memory_format=torch.preserve_format) for part in self.qkv(size))
        last = len(self.windows) - 1
        ours.prepare(*self.step(size, 0, *lengths[0]))

        def forward() -> Outputs:
            return Outputs(ours.attend(last, q, k, v), torch.ones(1, dtype=torch.bool, device=self.device))

        graph = capture(forward)
        for mine, theirs in ((self.pool.k, self.reference.k), (self.pool.v, self.reference.v)):
            theirs[last].copy_(mine[last])  # K and V that the capture stored
        for at_least, at_most in lengths:
            rows, table = self.step(size, 0, at_least, at_most)
            for part, values in zip((q, k, v), self.qkv(size), strict=True):
                part.copy_(values)
            ours.prepare(rows, table)
            self._sdpa.prepare(rows, table)
            graph.replay()
            expected = self._sdpa.attend(last, q.float(), k.float(), v.float())
            self._alike(graph.outputs.logits, expected, within)

    def _alike(self, got: Tensor, expected: Tensor, within: float) -> None:
        assert bool(got.isfinite().all())
        worst = float((got.float() - expected).abs().max())
        assert worst <= within, f"off by {worst:.4f}"
