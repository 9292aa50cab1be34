"""How products of routed experts are cut into blocks.

Which tile a step takes follows from the number of its tokens alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: rows of an expert, outputs of gate (and as many of up) and of down, inputs at a time."""

    block_m: int
    gate_up_n: int
    down_n: int
    block_k: int
    warps: int
    stages: int  # loads under way
    alone: bool = False  # each use is a block of its own: nothing is dealt out

    def shared_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a multiprocessor's shared memory that it takes at most: what is under way of both factors."""
        columns = max(2 * self.gate_up_n, self.down_n)
        return self.stages * (self.block_m + columns) * self.block_k * dtype.itemsize


# By the number of uses that they are for. The same block_k in all: sums run over the inputs in the same steps.
_HALF = (
    Tile(16, 64, 128, 64, 4, 4, alone=True),
    Tile(16, 64, 128, 64, 4, 4),
    Tile(64, 64, 128, 64, 4, 4),
    Tile(128, 128, 128, 64, 8, 3),
)
# float32 is multiplied exactly, without tensor cores
_FULL = (Tile(16, 32, 32, 32, 4, 2, alone=True), Tile(16, 32, 32, 32, 4, 2))
_ALONE = 4  # experts for each use, at least, where hardly two uses meet at one
_FILL = 2  # a larger block is taken when experts have more than this many of the smaller one on average


@functools.cache
def tiles(dtype: torch.dtype, device: torch.device | None = None) -> tuple[Tile, ...]:
    """All that `run` may take: the small ones, and what fits the device; without a device, all."""
    known = _FULL if dtype is torch.float32 else _HALF
    if device is None or device.type != "cuda":
        return known
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return tuple(tile for tile in known if tile.block_m == 16 or tile.shared_bytes(dtype) <= room)


def tile_for(num_uses: int, num_experts: int, dtype: torch.dtype, device: torch.device | None = None) -> Tile:
    """Very few uses: each alone. Few: small blocks, as each expert's last one is filled up. Many: large ones that read
    weights less often."""
    alone, chosen, *larger = tiles(dtype, device)
    if num_uses * _ALONE <= num_experts:
        return alone
    for tile in larger:
        if num_uses > _FILL * chosen.block_m * num_experts:
            chosen = tile
    return chosen


def max_blocks(num_uses: int, num_experts: int, block_m: int) -> int:
    """Blocks of `block_m` uses of one expert each, at worst: every expert in use has one use in its last block."""
    in_use = min(num_uses, num_experts)
    return in_use + (num_uses - in_use) // block_m
