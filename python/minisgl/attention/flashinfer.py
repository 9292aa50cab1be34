"""Attention by FlashInfer: paged prefill and decode; decode works under CUDA graphs.

A wrapper's `plan` computes on the host how the work is split, and copies that to the device by itself, from pinned
memory of its own, on the current stream. So each use has its own wrapper, and a wrapper is planned again only when the
copy of its last plan has ended; with one step in flight it has by then. The small arguments of `plan` are copied to the
device as well: they are passed in pinned memory, for which such a copy never waits. Lists of pages are on the device
already, and a graph's wrapper has that very list as its buffer, so that nothing is copied.

The module also computes how much float workspace FlashInfer's plans need for partial results of rows whose KV is split.
A plan that does not fit raises in the middle of serving, or during capture; so the maximum that any plan can need is
derived from the scheduler of flashinfer 0.6.7 (`attention/scheduler.cuh`).

Invariants: what a graph reads stays at the address that it had when the graph was captured; `plan` is never part of a
graph; lists of pages are gathered on the device. No plan of a backend with these heads, graph sizes and multiprocessors
needs more workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.attention.api import AttentionRows
from minisgl.attention.backend import BackendError
from minisgl.attention.kv_pool import KVPool
from minisgl.kernels.ops import gather_pages

GROUP_FOR_TENSOR_CORES = 4  # query heads per KV head from which decode is faster on tensor cores
_LEAST = 128 * 2**20  # recommended by the package
_BLOCKS = 2  # blocks per multiprocessor that the scheduler assumes
_MOST_BLOCKS = 32  # maximum of a multiprocessor: CUDA-core decode asks the device for the number
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.query // self.kv

    @property
    def tensor_cores(self) -> bool:
        """Whether decode uses tensor cores. The other kernel exists only for groups of 1, 2, 3, 4 and 8 query heads."""
        return self.group >= GROUP_FOR_TENSOR_CORES


def workspace_bytes(heads: Heads, multiprocessors: int, graph_sizes: Sequence[int]) -> int:
    splits = _BLOCKS * multiprocessors // heads.kv  # maximum splits of rows in eager plans
    needs = [_partial_bytes(heads, splits, _tile(heads, 2**31))]
    if heads.tensor_cores:
        tile = _tile(heads, heads.group)
        for size in graph_sizes:  # a graph reserves space for each row's own tiles
            tiles = -(-size * heads.group // tile) + size - 1
            needs.append(_partial_bytes(heads, max(splits, tiles), tile))
    else:
        needs.append(_partial_bytes(heads, _MOST_BLOCKS * multiprocessors // heads.kv, 1))
    return max(_LEAST, *needs)


def _tile(heads: Heads, queries: int) -> int:
    """Return FlashInfer's tile size in rows, for `queries` query rows of a KV head."""
    if queries > 64 and heads.dim < 256:
        return 128
    return 64 if queries > 16 else 16


def _partial_bytes(heads: Heads, splits: int, tile: int) -> int:
    """Return the bytes of partial results: unnormalized outputs and their scales, aligned separately."""
    return heads.query * splits * tile * (heads.dim + 1) * _FLOAT32 + 32


_NO_WINDOW = -1
_LINES_OF_A_COMPILER = 4  # last lines of compiler output in an error
_Int32 = npt.NDArray[np.int32]


def recorded_event() -> torch.cuda.Event:
    """Return an event that was recorded on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


class _Planned:
    """A FlashInfer wrapper, and the event after the copy of its last plan."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event | None = None

    def plan(self, *args: object, **settings: object) -> None:
        if self._copied is None:
            self._plan_first(*args, **settings)
        else:
            self._copied.synchronize()
            self.wrapper.plan(*args, **settings)
        self._copied = recorded_event()

    def _plan_first(self, *args: object, **settings: object) -> None:
        """Plan for the first time, which compiles kernels that are not cached. Raises `BackendError` if that fails."""
        try:
            self.wrapper.plan(*args, **settings)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:  # no compiler, no ninja, or their errors
            lines = str(error).splitlines() or [type(error).__name__]
            text = " / ".join([lines[0], *lines[1:][-_LINES_OF_A_COMPILER:]])
            raise BackendError(
                f"FlashInfer cannot compile its kernels: {text}. It compiles them with nvcc (CUDA_HOME) and ninja "
                "when they are first used: install these, or use --attention-backend torch_sdpa"
            ) from error


class FlashInfer:
    """The FlashInfer backend. `windows`: by layer, as for `TorchSdpa`. `graph_sizes`: row counts of decode steps whose
    wrappers keep their buffers in place. `prefill`: the kernels for rows of several tokens, "fa2" or "fa3"."""

    graph_obstacle: ClassVar[str] = ""

    def __init__(
        self,
        pool: KVPool,
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None],
        *,
        max_rows: int,
        max_pages_per_row: int,
        graph_sizes: Sequence[int] = (),
        prefill: str = "fa2",
    ) -> None:
        import flashinfer

        self._flashinfer = flashinfer
        self._pool = pool
        self._heads = heads
        self._dtype = dtype
        self._pinned = device.type == "cuda"
        self._prefill_backend = prefill
        # `window_left` excludes the token that attends
        self._window_of = [_NO_WINDOW if window is None else window - 1 for window in windows]
        self._windows = sorted(set(self._window_of))
        # one for all wrappers, which run one after the other
        size = workspace_bytes(heads, _multiprocessors(device), graph_sizes)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._page_list = torch.zeros(max_rows * max_pages_per_row, dtype=torch.int32, device=device)
        self._graph_decode = {
            size: {window: _Planned(self._decode_wrapper(size)) for window in self._windows} for size in graph_sizes
        }
        self._eager_decode = {window: _Planned(self._decode_wrapper(None)) for window in self._windows}
        self._prefill = {window: _Planned(self._prefill_wrapper()) for window in self._windows}
        self._decode = self._eager_decode  # wrappers of this step
        self._num_decode = 0
        self._num_tokens = 0
        self._out_loc = self._page_list[:0]

    def _decode_wrapper(self, size: int | None) -> Any:
        settings: dict[str, Any] = {}
        if size is not None:
            settings = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._page_list.new_zeros(size + 1),
                "paged_kv_indices_buffer": self._page_list,
                "paged_kv_last_page_len_buffer": self._page_list.new_zeros(size),
            }
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_tensor_cores=self._heads.tensor_cores,
            backend="fa2",
            **settings,
        )

    def _prefill_wrapper(self) -> Any:
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=self._prefill_backend
        )

    # ----------------------------------------------------------------------------------------------------- prepare

    def prepare(self, rows: AttentionRows, page_table: Tensor) -> None:
        assert rows.device is not None
        device, num_decode = rows.device, rows.num_decode
        pages = -(-rows.seq_lens // self._pool.page_size)
        indptr: _Int32 = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        last_page_len: _Int32 = ((rows.seq_lens - 1) % self._pool.page_size + 1).astype(np.int32)
        page_list = self._page_list[: int(indptr[-1])]
        gather_pages(page_table, device.slots, device.kv_indptr, page_list)
        self._num_decode, self._num_tokens, self._out_loc = num_decode, len(rows.out_loc), device.out_loc
        whole = num_decode == len(rows.slots)
        self._decode = self._graph_decode.get(num_decode, self._eager_decode) if whole else self._eager_decode
        if num_decode:
            used = page_list[: int(indptr[num_decode])]
            self._plan_decode(indptr[: num_decode + 1], used, last_page_len[:num_decode])
        if not whole:
            self._plan_prefill(rows, indptr[num_decode:], page_list, last_page_len[num_decode:])

    def _staged(self, array: _Int32) -> Tensor:
        """Return a pinned copy of `array`, from which a device can copy while the host continues."""
        staged = torch.empty(len(array), dtype=torch.int32, pin_memory=self._pinned)
        staged.numpy()[:] = array
        return staged

    def _plan_decode(self, indptr: _Int32, page_list: Tensor, last_page_len: _Int32) -> None:
        for window, planned in self._decode.items():
            planned.plan(
                self._staged(indptr),
                page_list,
                self._staged(last_page_len),
                self._heads.query,
                self._heads.kv,
                self._heads.dim,
                self._pool.page_size,
                window_left=window,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

    def _plan_prefill(self, rows: AttentionRows, indptr: _Int32, page_list: Tensor, last_page_len: _Int32) -> None:
        extend_lens = rows.extend_lens[rows.num_decode :]
        qo_indptr = np.concatenate([[0], np.cumsum(extend_lens)]).astype(np.int32)
        for window, planned in self._prefill.items():
            planned.plan(
                self._staged(qo_indptr),
                self._staged(indptr - indptr[0]),
                page_list[int(indptr[0]) :],
                self._staged(last_page_len),
                self._heads.query,
                self._heads.kv,
                self._heads.dim,
                self._pool.page_size,
                causal=True,
                window_left=window,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

    # ------------------------------------------------------------------------------------------------------ attend

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.store(layer, self._out_loc, k, v)
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        cache = (self._pool.k[layer], self._pool.v[layer])
        window = self._window_of[layer]
        q = q.contiguous()
        if self._num_decode == self._num_tokens:
            attended: Tensor = self._decode[window].wrapper.run(q, cache)
            return attended
        out = torch.empty_like(q)
        if self._num_decode:
            self._decode[window].wrapper.run(q[: self._num_decode], cache, out=out[: self._num_decode])
        self._prefill[window].wrapper.run(q[self._num_decode :], cache, out=out[self._num_decode :])
        return out


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def renormalise(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Truncate probabilities like `sampler.truncate`, by FlashInfer's kernels, without sorting. Tokens as likely as the
    last one kept are kept, too. Only the kernels' selection is used, not their values: they scale by a sum whose order
    varies, and by an approximate reciprocal. NaN reaches only the first kernel; the second might never return."""
    from flashinfer import sampling

    k = torch.where(top_k > 0, top_k, probabilities.shape[-1]).int()
    top_k_probabilities = sampling.top_k_renorm_probs(probabilities.contiguous(), k)
    likely = torch.where(top_k_probabilities > 0, probabilities, 0.0)
    share = likely / likely.sum(-1, keepdim=True).clamp_(min=torch.finfo(likely.dtype).tiny)
    top_p_probabilities = sampling.top_p_renorm_probs(share, top_p.float().contiguous(), is_deterministic=True)
    return torch.where((top_p_probabilities > 0) | (top_p >= 1)[:, None], likely, 0.0)
