"""Stand-ins for the flashinfer package, with the calls that minisgl makes: plain softmax over the pages that a plan
names, in float32, on the CPU. `module` replaces the whole package.

Signatures have those parameters of flashinfer 0.6.7 that minisgl gives (`test_flashinfer_package.py` compares them with
the package's). Plans copy, check and refuse the same arguments as the package; a plan under CUDA graphs copies into the
buffers that it was made with, and `run` reads these; a kernel runs only after a plan for the lengths it finds there.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log: list[str] = []
INT_WORKSPACE = 8 * 2**20
GROUPS = (1, 2, 3, 4, 8)  # that the decode on CUDA cores is made for


def attend(q: Tensor, k: Tensor, v: Tensor, window_left: int) -> Tensor:
    """Return the attention of q [n, heads, d], the last n positions, over k and v [m, kv_heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) / q.shape[2] ** 0.5
    key = torch.arange(len(k))[None, :]
    last = torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = key > last
    if window_left >= 0:
        hidden |= key < last - window_left
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v.float()).to(q.dtype)


def attend_pages(
    q: Tensor, cache: tuple[Tensor, Tensor], qo_indptr: Tensor, pages: tuple[Tensor, Tensor, Tensor], window_left: int
) -> Tensor:
    """Return the attention of each row over its pages. `pages`: indptr, page indices, last page's length, by row."""
    indptr, indices, last_page_len = pages
    out = torch.empty_like(q)
    for row in range(len(last_page_len)):
        mine = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        length = (len(mine) - 1) * cache[0].shape[1] + int(last_page_len[row])
        k, v = (tensor[mine].flatten(0, 1)[:length] for tensor in cache)
        at = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
        out[at] = attend(q[at], k, v, window_left)
    return out


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and backend == "fa2"
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer[:1024].any()
        self.device, self.graph, self.tensor_cores = float_workspace_buffer.device, use_cuda_graph, use_tensor_cores
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_last_page_len_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

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
        check_lists(indptr, indices, last_page_len)
        assert self.tensor_cores or num_qo_heads // num_kv_heads in GROUPS
        if self.graph:
            assert len(last_page_len) == len(self._paged_kv_last_page_len_buf)
            assert len(indices) <= len(self._paged_kv_indices_buf)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr.to(self.device), indices.to(self.device)
            self._paged_kv_last_page_len_buf = last_page_len.to(self.device)
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        self._window_left = window_left

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        check_run(q, paged_kv_cache, self._shape, self._dtypes, out, len(self._paged_kv_last_page_len_buf))
        pages = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf)
        attended = attend_pages(q, paged_kv_cache, torch.arange(len(q) + 1), pages, self._window_left)
        return attended if out is None else out.copy_(attended)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and backend in ("fa2", "fa3")
        self.device = float_workspace_buffer.device

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
        check_lists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu" and int(qo_indptr[0]) == 0
        self._qo_indptr = qo_indptr.to(self.device)
        self._pages = tuple(t.to(self.device) for t in (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len))
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        self._window_left = window_left

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        check_run(q, paged_kv_cache, self._shape, self._dtypes, out, int(self._qo_indptr[-1]))
        attended = attend_pages(q, paged_kv_cache, self._qo_indptr, self._pages, self._window_left)
        return attended if out is None else out.copy_(attended)


def check_lists(indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
    """Assert that `indptr` and `last_page_len` are on the host: the plan must not wait for the device."""
    for tensor in (indptr, indices, last_page_len):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.dim() == 1
    assert indptr.device.type == last_page_len.device.type == "cpu"
    assert int(indptr[0]) == 0 and len(indptr) == len(last_page_len) + 1
    assert int(indptr[-1]) <= len(indices)
    assert bool((indptr.diff() >= 1).all()), "a row without pages"


def check_run(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    shape: tuple[int, int, int, int],
    dtypes: tuple[Any, Any],
    out: Tensor | None,
    num_tokens: int,
) -> None:
    heads, kv_heads, dim, page_size = shape
    assert q.is_contiguous() and q.shape == (num_tokens, heads, dim)
    assert (q.dtype, cache[0].dtype) == dtypes
    assert cache[0].shape == cache[1].shape and cache[0].shape[1:] == (page_size, kv_heads, dim)
    assert cache[0].stride() == cache[1].stride()
    if out is not None:
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()


# ----------------------------------------------------------------------------------------------------------- sampling


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """Renormalize the top-p tokens, including those as likely as the token at which p is reached."""
    assert isinstance(top_p, Tensor) and top_p.dtype == torch.float32 and top_p.is_contiguous() and is_deterministic
    assert probs.is_contiguous() and probs.dtype == torch.float32 and len(top_p) == len(probs)
    assert not probs.isnan().any(), "the package's kernel for small vocabularies may never return"
    total = probs.sum(-1)
    assert bool((((total - 1).abs() < 1e-5) | (total == 0)).all()), "and it counts on a share of one"
    ordered = probs.sort(-1, descending=True).values
    reached = (ordered.cumsum(-1) < top_p[:, None]).sum(-1).clamp_(max=probs.shape[1] - 1)
    return _renormalised(probs, ordered.gather(1, reached[:, None]))


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Renormalize the top-k tokens, including those as likely as the k-th."""
    assert isinstance(top_k, Tensor) and top_k.dtype == torch.int32 and top_k.is_contiguous()
    assert probs.is_contiguous() and len(top_k) == len(probs) and bool((top_k > 0).all())
    ordered = probs.sort(-1, descending=True).values
    return _renormalised(probs, ordered.gather(1, top_k.long().clamp(max=probs.shape[1])[:, None] - 1))


def _renormalised(probs: Tensor, least: Tensor) -> Tensor:
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / (kept.sum(-1, keepdim=True) * 1.000001)  # the package's reciprocal is approximate


def module() -> ModuleType:
    made: Any = ModuleType("flashinfer")
    made.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    made.sampling = ModuleType("flashinfer.sampling")
    made.sampling.top_p_renorm_probs = top_p_renorm_probs
    made.sampling.top_k_renorm_probs = top_k_renorm_probs
    return made
