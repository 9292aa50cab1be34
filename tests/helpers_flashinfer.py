"""A stand-in for the flashinfer package, with the calls that minisgl makes: plain softmax over the pages that a plan
names, in float32, on the CPU.

Keeps true: signatures, argument order and the checks of buffers are those of flashinfer 0.6.7; a plan under CUDA graphs
copies into the buffers that it was made with, and `run` reads these.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log: list[str] = []


def attend(q: Tensor, k: Tensor, v: Tensor, window_left: int) -> Tensor:
    """q [n, heads, d] at the end of k and v [m, kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) / q.shape[2] ** 0.5
    key = torch.arange(len(k))[None, :]
    last = torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = key > last
    if window_left >= 0:
        hidden |= key < last - window_left
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v.float()).to(q.dtype)


class _Wrapper:
    """What both wrappers share: rows over pages."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    shape: tuple[int, int, int, int]
    window_left: int

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        heads, kv_heads, dim, page_size = self.shape
        assert q.is_contiguous() and q.shape[1:] == (heads, dim)
        assert cache[0].shape[1:] == (page_size, kv_heads, dim)
        out = torch.empty_like(q) if out is None else out
        assert out.shape == q.shape and len(q) == int(self.qo_indptr[-1])
        for row in range(len(self.last_page_len)):
            pages = self.indices[int(self.indptr[row]) : int(self.indptr[row + 1])].long()
            length = (len(pages) - 1) * page_size + int(self.last_page_len[row])
            k, v = (tensor[pages].flatten(0, 1)[:length] for tensor in cache)
            at = slice(int(self.qo_indptr[row]), int(self.qo_indptr[row + 1]))
            out[at] = attend(q[at], k, v, self.window_left)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and backend == "fa2" and float_workspace_buffer.dtype == torch.uint8
        self.graph = use_cuda_graph
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_last_page_len_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self.last_page_len = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        log.append(f"decode {len(last_page_len)} {'graph' if self.graph else 'eager'}")
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        if self.graph:
            assert len(last_page_len) == len(self.last_page_len) and len(indices) <= len(self.indices)
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len
        self.qo_indptr = torch.arange(len(last_page_len) + 1)
        self.shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.window_left = window_left


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert kv_layout == "NHD" and backend == "fa2"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        log.append(f"prefill {len(paged_kv_last_page_len)}")
        assert causal
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert int(paged_kv_indptr[0]) == 0 and int(qo_indptr[0]) == 0
        self.qo_indptr, self.indptr = qo_indptr, paged_kv_indptr
        self.indices, self.last_page_len = paged_kv_indices, paged_kv_last_page_len
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.window_left = window_left


def module() -> ModuleType:
    made = ModuleType("flashinfer")
    made.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return made
