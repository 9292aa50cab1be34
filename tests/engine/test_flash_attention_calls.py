"""What the flash-attn backend asks of the package, on a stand-in with its calls (2.x): it attends as torch does, and
what a graph reads stays in place."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention import AttentionRows, KVPool, TorchSdpa
from minisgl.attention.api import RowsThere
from minisgl.attention.flash_attention import FlashAttention
from tests.helpers_flashinfer import attend

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8
PAGE, COLUMNS, WINDOWS = 256, 3, (None, 300)
calls: list[tuple[str, tuple[int, ...]]] = []  # name, shape of the block table


def _row(q: Tensor, caches: tuple[Tensor, Tensor], length: int, table: Tensor, window_size: tuple[int, int]) -> Tensor:
    assert table.dtype == torch.int32 and table.stride(-1) == 1
    assert window_size == (-1, -1) or window_size[1] == 0
    k, v = (cache[table.long()].flatten(0, 1)[:length] for cache in caches)
    return attend(q, k, v, window_size[0])


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    assert all(x is None for x in (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes))
    assert isinstance(cache_seqlens, Tensor) and cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    assert block_table is not None and block_table.shape[0] == len(q) == len(cache_seqlens)
    assert causal and q.stride(-1) == 1 and k_cache.shape[1] % 256 == 0
    calls.append(("with_kvcache", tuple(block_table.shape)))
    lens = cache_seqlens.tolist()
    return torch.stack(
        [_row(q[i], (k_cache, v_cache), lens[i], block_table[i], window_size) for i in range(len(q))]
    )  # [rows, 1, heads, d]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert causal and q.is_contiguous() and block_table is not None
    for sums, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert sums.dtype == torch.int32 and int(sums[0]) == 0 and int(sums.diff().max()) == longest
    calls.append(("varlen", tuple(block_table.shape)))
    starts, lens = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    rows = [_row(q[starts[i] : starts[i + 1]], (k, v), lens[i], block_table[i], window_size) for i in range(len(lens))]
    return torch.cat(rows)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("flash_attn")
    made.flash_attn_with_kvcache = flash_attn_with_kvcache
    made.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", made)
    calls.clear()


def pool(seed: int) -> KVPool:
    torch.manual_seed(seed)
    made = KVPool(
        num_layers=2, num_pages=24, page_size=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=CPU
    )
    for tensor in (*made.k, *made.v):
        tensor.normal_()
    return made


class Steps:
    """Steps of random rows, whose device part lies in the same memory each time, as an engine's does."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._block = torch.zeros(4, 8192, dtype=torch.int32)

    def draw(self, num_decode: int, num_prefill: int) -> tuple[AttentionRows, Tensor]:
        rng, rows = self._rng, num_decode + num_prefill
        pages = rng.permutation(24).reshape(8, COLUMNS).astype(np.int32)
        slots = rng.permutation(8)[:rows].astype(np.int32)
        seq_lens = rng.integers(1, PAGE * COLUMNS + 1, rows).astype(np.int32)
        extend_lens = np.ones(rows, np.int32)
        for row in range(num_decode, rows):
            extend_lens[row] = rng.integers(1, seq_lens[row] + 1)
        out_loc = [
            pages[slots[row], at // PAGE] * PAGE + at % PAGE
            for row in range(rows)
            for at in range(seq_lens[row] - extend_lens[row], seq_lens[row])
        ]
        places = np.array(out_loc, np.int32)
        indptr = np.concatenate([[0], np.cumsum(-(-seq_lens // PAGE))]).astype(np.int32)
        views = []
        for line, values in zip(self._block, (slots, seq_lens, indptr, places), strict=True):
            view = line[: len(values)]
            views.append(view.copy_(torch.from_numpy(values)))
        there = RowsThere(*views)
        return AttentionRows(num_decode, slots, seq_lens, extend_lens, places, there), torch.from_numpy(pages)


def heads_of(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    merged = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = merged.split((HEADS, KV_HEADS, KV_HEADS), 1)
    return q, k, v


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "name"),
    [(5, 0, "with_kvcache"), (4, 0, "with_kvcache"), (0, 3, "varlen"), (3, 2, "varlen")],
)
@pytest.mark.parametrize("seed", range(3))
def test_it_attends_as_torch_does(seed: int, num_decode: int, num_prefill: int, name: str) -> None:
    mine, reference, steps = pool(seed), pool(seed), Steps(seed)
    ours = FlashAttention(mine, CPU, WINDOWS, max_pages_per_row=COLUMNS, graph_sizes=(4,))
    sdpa = TorchSdpa(reference, torch.float32, CPU, WINDOWS)
    for _ in range(3):
        rows, table = steps.draw(num_decode, num_prefill)
        ours.prepare(rows, table)
        sdpa.prepare(rows, table)
        calls.clear()
        for layer in range(2):
            q, k, v = heads_of(len(rows.out_loc))
            assert torch.allclose(ours.attend(layer, q, k, v), sdpa.attend(layer, q, k, v), atol=1e-5)
        widest = COLUMNS if num_decode == 4 else -(-int(rows.seq_lens.max()) // PAGE)
        assert calls == [(name, (num_decode + num_prefill, widest))] * 2
    assert all(map(torch.equal, (*mine.k, *mine.v), (*reference.k, *reference.v)))


def test_a_replayed_graph_attends_to_the_rows_of_its_step() -> None:
    """A graph calls the kernels again with the tensors of its capture, whatever the backend holds by then."""
    mine, reference, steps = pool(0), pool(0), Steps(0)
    ours = FlashAttention(mine, CPU, WINDOWS, max_pages_per_row=COLUMNS, graph_sizes=(2, 4))
    sdpa = TorchSdpa(reference, torch.float32, CPU, WINDOWS)
    ours.prepare(*steps.draw(4, 0))
    captured = dict(ours._step)
    for num_decode in (2, 4, 4):
        rows, table = steps.draw(num_decode, 0)
        ours.prepare(rows, table)
        if num_decode != 4:
            continue
        sdpa.prepare(rows, table)
        q, k, v = heads_of(4)
        expected = sdpa.attend(1, q, k, v)
        mine.store(1, rows.there.out_loc, k, v)  # type: ignore[union-attr]
        window = ours._windows[1]
        pools = (mine.k[1], mine.v[1])
        replayed = flash_attn_with_kvcache(q.unsqueeze(1), *pools, causal=True, window_size=window, **captured)
        assert torch.allclose(replayed.squeeze(1), expected, atol=1e-5)
