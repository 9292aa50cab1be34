"""Tile sizes of the matrix products of routed experts.

The number of a step's tokens alone decides its tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes: rows of an expert, output columns of gate (and as many of up) and of down, inputs per iteration."""

    block_m: int
    gate_up_n: int
    down_n: int
    block_k: int
    warps: int
    stages: int  # loads in flight
    alone: bool = False  # each use is a block of its own, without assignment

    def shared_bytes(self, dtype: torch.dtype) -> int:
        """Return the maximum shared memory of a multiprocessor that the tile uses, in bytes (loads in flight)."""
        columns = max(2 * self.gate_up_n, self.down_n)
        return self.stages * (self.block_m + columns) * self.block_k * dtype.itemsize


# by the number of uses that they are for. block_k is the same in all, so that sums run over the inputs in the same
# steps
_HALF = (
    Tile(16, 64, 128, 64, 4, 4, alone=True),
    Tile(16, 64, 128, 64, 4, 4),
    Tile(64, 64, 128, 64, 4, 4),
    Tile(128, 128, 128, 64, 8, 3),
)
# float32 products are exact, without tensor cores
_FULL = (Tile(16, 32, 32, 32, 4, 2, alone=True), Tile(16, 32, 32, 32, 4, 2))
_ALONE = 4  # minimum of experts per use, so that two uses hardly meet at one
_FILL = 2  # a larger block is used if experts have more than this many of the smaller one on average


@functools.cache
def tiles(dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tile, ...]:
    """Return the tiles that `run` may use: the small ones, and those that fit the device; without a device, all."""
    candidates = _FULL if dtype is torch.float32 else _HALF
    if device is None or device.type != "cuda":
        return candidates
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return tuple(tile for tile in candidates if tile.block_m == 16 or tile.shared_bytes(dtype) <= shared_memory)


def tile_for(num_uses: int, num_experts: int, dtype: torch.dtype, device: torch.device | None = None) -> Tile:
    """Return the tile for a number of uses. Very few uses: one block each. Few: small blocks, because each expert's
    last one is padded. Many: large blocks, which read weights less often."""
    alone, chosen, *larger = tiles(dtype, device)
    if num_uses * _ALONE <= num_experts:
        return alone
    for tile in larger:
        if num_uses > _FILL * chosen.block_m * num_experts:
            chosen = tile
    return chosen


def max_blocks(num_uses: int, num_experts: int, block_m: int) -> int:
    """Return the maximum number of blocks of `block_m` uses: every used expert has one use in its last block."""
    in_use = min(num_uses, num_experts)
    return in_use + (num_uses - in_use) // block_m
