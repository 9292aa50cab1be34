"""Routed experts on a device as one operation whose sizes the host knows: it never waits, and CUDA graphs can hold it.

`layers.experts` has the grouped form in torch, which works without Triton but asks the device for each expert's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernels.experts_tiles import Tile, tile_for, tiles
from minisgl.kernels.ops import use_triton


def serves(weight: Tensor) -> bool:
    """Return whether `run` supports experts with these weights."""
    return use_triton(weight)


def run(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor, tile: Tile | None = None) -> Tensor:
    """Return the weighted sum of each token's experts, down(silu(gate(x)) * up(x)).

    x [n, hidden]; gate_up [experts, 2 * inner, hidden], gate before up; down [experts, hidden, inner]; chosen [n, k]
    integers, the experts of each token; shares [n, k]. x and both weights have one dtype: bfloat16, float16 or float32.
    Returns [n, hidden]. Call only if `serves`.
    """
    from minisgl.kernels import experts_triton

    if not len(x) or not down.shape[2]:
        return torch.zeros_like(x)
    tile = tile or tile_for(chosen.numel(), len(down), x.dtype, x.device)
    return experts_triton.run(x.contiguous(), gate_up, down, chosen.contiguous(), shares.contiguous(), tile)


def warm_up(gate_up: Tensor, down: Tensor) -> None:
    """Compile everything that `run` may need for these weights; does nothing if it does not support them."""
    if not serves(down):
        return
    x, chosen = down.new_zeros(1, down.shape[1]), torch.zeros(1, 1, dtype=torch.int32, device=down.device)
    for tile in tiles(down.dtype, down.device):
        run(x, gate_up, down, chosen, x[:, :1], tile)
