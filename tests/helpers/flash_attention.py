"""Stand-in for the flash-attn package (2.x), with the calls that minisgl makes: plain softmax over pages on the CPU.

Signatures are the package's; arguments that its kernels refuse are refused.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.helpers.flashinfer import attend

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


def module() -> Any:
    made: Any = ModuleType("flash_attn")
    made.flash_attn_with_kvcache = flash_attn_with_kvcache
    made.flash_attn_varlen_func = flash_attn_varlen_func
    return made
