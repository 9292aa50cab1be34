"""torch's attention through the page table, against plain softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionRows, KVPool, TorchSdpa

pytestmark = pytest.mark.any_cpu


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """q [n, heads, d], the last n of k and v [m, kv_heads, d] -> [n, heads, d], by plain softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    behind = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])[None, :]
    hidden = (behind < 0) | (behind >= (window or k.shape[0]))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("windows", [(None, None), (None, 11), (5, 6), (1, 37), (1000, 16)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_attention_reads_through_the_page_table(
    page_size: int, heads: tuple[int, int], windows: tuple[int | None, int | None]
) -> None:
    generator = torch.Generator().manual_seed(page_size)
    num_heads, kv_heads, dim, num_pages = *heads, 16, 400
    lens = [3, 160, 40, 1, 7, 64]  # decode rows of very different lengths, then prefill rows
    extends = [1, 1, 1, 1, 7, 20]
    pool = KVPool(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for tensor in (*pool.k, *pool.v):
        tensor.normal_(generator=generator)  # what other requests left behind
    table = torch.full((7, 160 // page_size), num_pages)
    free = torch.randperm(num_pages, generator=generator).tolist()
    keys = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
    values = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
    locs, out_loc = [], []
    for row, length in enumerate(lens):
        columns = -(-length // page_size)
        table[row, :columns] = torch.tensor([free.pop() for _ in range(columns)])
        at = table[row, torch.arange(length) // page_size] * page_size + torch.arange(length) % page_size
        locs.append(at)
        out_loc.append(at[-extends[row] :])
    backend = TorchSdpa(pool, torch.float32, torch.device("cpu"), windows)
    rows = AttentionRows(
        4,
        np.arange(6, dtype=np.int32),
        np.array(lens, np.int32),
        np.array(extends, np.int32),
        torch.cat(out_loc).numpy().astype(np.int32),
    )
    for layer in range(2):
        for row in range(6):
            past = lens[row] - extends[row]
            pool.store(layer, locs[row][:past], keys[row][:past], values[row][:past])
    backend.prepare(rows, table)
    q = torch.randn(sum(extends), num_heads, dim, generator=generator)
    new_k = torch.cat([k[-n:] for k, n in zip(keys, extends, strict=True)])
    new_v = torch.cat([v[-n:] for v, n in zip(values, extends, strict=True)])
    starts = np.concatenate([[0], np.cumsum(extends)])
    for layer in range(2):
        out = backend.attend(layer, q, new_k, new_v)
        for row in range(6):
            own = slice(starts[row], starts[row + 1])
            expected = dense(q[own], keys[row], values[row], windows[layer])
            torch.testing.assert_close(out[own], expected, atol=1e-5, rtol=1e-5)
