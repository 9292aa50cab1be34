"""torch's attention through the page table, against plain softmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from minisgl.attention import AttentionRows, Eager, KVPool, LayerAttention, TorchSdpa, scores, torch_sdpa

pytestmark = pytest.mark.any_cpu


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
    """q [n, heads, k_dim], the last n of k and v [m, kv_heads, ...] -> [n, heads, v_dim], by plain softmax."""
    group, window = q.shape[1] // k.shape[1], layer.window
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (layer.scale or q.shape[2] ** -0.5)
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    behind = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])[None, :]
    hidden = (behind < 0) | (behind >= (window or k.shape[0]))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("windows", [(None, None), (None, 11), (5, 6), (1, 37), (1000, 16)], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_attention_reads_through_the_page_table(
    page_size: int, heads: tuple[int, int], windows: tuple[int | None, int | None]
) -> None:
    check([LayerAttention(*heads, 16, 16, window) for window in windows], page_size)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
def test_layers_have_scales_caps_and_sizes_of_their_own(
    page_size: int, scale: float | None, window: int | None, softcap: float | None
) -> None:
    """The first layer is a plain one of other heads."""
    check([LayerAttention(8, 1, 16, 16), LayerAttention(6, 2, 12, 20, window, scale, softcap)], page_size)


def test_steps_of_scores_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into one query each, and into gathers of one row each."""
    monkeypatch.setattr(scores, "SCORE_BYTES", 1)
    monkeypatch.setattr(torch_sdpa, "SCRATCH_BYTES", 1)
    check([LayerAttention(6, 2, 12, 20, None, 0.7, 0.5), LayerAttention(6, 2, 12, 20, 11)], 4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_eager_attention_calls_no_fused_function(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a fused function was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    layers = [
        LayerAttention(8, 1, 16, 16),
        LayerAttention(6, 2, 12, 20, 11, 0.7),
        LayerAttention(6, 2, 12, 20, None, 0.7, 0.5),
    ]
    check(layers, page_size, Eager)
    with pytest.raises(AssertionError, match="a fused function was called"):
        check(layers, page_size)


def check(layers: Sequence[LayerAttention], page_size: int, kind: type[TorchSdpa] = TorchSdpa) -> None:
    """Rows of all kinds in one step, over pages in any order that others have used."""
    generator = torch.Generator().manual_seed(page_size)
    num_pages = 400
    lens = [3, 160, 40, 1, 7, 64]  # decode rows of very different lengths, then prefill rows
    extends = [1, 1, 1, 1, 7, 20]
    pool = KVPool(layers, num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in (*pool.k, *pool.v):
        tensor.normal_(generator=generator)  # what other requests left behind
    table = torch.full((7, 160 // page_size), num_pages)
    free = torch.randperm(num_pages, generator=generator).tolist()
    locs, out_loc = [], []
    for row, length in enumerate(lens):
        columns = -(-length // page_size)
        table[row, :columns] = torch.tensor([free.pop() for _ in range(columns)])
        at = table[row, torch.arange(length) // page_size] * page_size + torch.arange(length) % page_size
        locs.append(at)
        out_loc.append(at[-extends[row] :])
    backend = kind.of(layers, pool)
    rows = AttentionRows(
        4,
        np.arange(6, dtype=np.int32),
        np.array(lens, np.int32),
        np.array(extends, np.int32),
        torch.cat(out_loc).numpy().astype(np.int32),
    )
    backend.prepare(rows, table)
    starts = np.concatenate([[0], np.cumsum(extends)])
    for index, layer in enumerate(layers):
        keys = [torch.randn(n, layer.kv_heads, layer.k_dim, generator=generator) for n in lens]
        values = [torch.randn(n, layer.kv_heads, layer.v_dim, generator=generator) for n in lens]
        for row in range(6):
            past = lens[row] - extends[row]
            pool.store(index, locs[row][:past], keys[row][:past], values[row][:past])
        q = torch.randn(sum(extends), layer.heads, layer.k_dim, generator=generator)
        new_k = torch.cat([k[-n:] for k, n in zip(keys, extends, strict=True)])
        new_v = torch.cat([v[-n:] for v, n in zip(values, extends, strict=True)])
        out = backend.attend(index, q, new_k, new_v)
        assert out.shape == (len(q), layer.heads, layer.v_dim)
        for row in range(6):
            own = slice(starts[row], starts[row + 1])
            expected = dense(q[own], keys[row], values[row], layer)
            torch.testing.assert_close(out[own], expected, atol=1e-5, rtol=1e-5)
