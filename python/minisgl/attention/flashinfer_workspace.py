"""How much float workspace FlashInfer's plans take, for partial results of rows whose KV is split.

A plan that does not fit raises in the middle of serving, or while graphs are captured; so the most that any plan can
ask for is worked out from the scheduler of flashinfer 0.6.7 (`attention/scheduler.cuh`).

Invariants: no plan of a backend with these heads, graph sizes and multiprocessors needs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GROUP_FOR_TENSOR_CORES = 4  # query heads of a KV head, from which on decode pays there
_LEAST = 128 * 2**20  # what the package advises
_BLOCKS = 2  # that the scheduler counts on for each multiprocessor
_MOST_BLOCKS = 32  # that a multiprocessor can hold: the CUDA-core decode asks the device how many
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
        """Whether decode takes them. The other kernel exists for groups of 1, 2, 3, 4 and 8 only."""
        return self.group >= GROUP_FOR_TENSOR_CORES


def workspace_bytes(heads: Heads, multiprocessors: int, graph_sizes: Sequence[int]) -> int:
    splits = _BLOCKS * multiprocessors // heads.kv  # eager plans split rows only up to so many
    needs = [_partial_bytes(heads, splits, _tile(heads, 2**31))]
    if heads.tensor_cores:
        tile = _tile(heads, heads.group)
        for size in graph_sizes:  # a graph keeps room for each row's own tiles
            tiles = -(-size * heads.group // tile) + size - 1
            needs.append(_partial_bytes(heads, max(splits, tiles), tile))
    else:
        needs.append(_partial_bytes(heads, _MOST_BLOCKS * multiprocessors // heads.kv, 1))
    return max(_LEAST, *needs)


def _tile(heads: Heads, queries: int) -> int:
    """Rows of a tile, for so many queries of a KV head."""
    if queries > 64 and heads.dim < 256:
        return 128
    return 64 if queries > 16 else 16


def _partial_bytes(heads: Heads, splits: int, tile: int) -> int:
    """Unnormalised outputs and their scales, each at an address of its own alignment."""
    return heads.query * splits * tile * (heads.dim + 1) * _FLOAT32 + 32
