"""Linear layers, one or several of a checkpoint side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.layers.packing import linear, pack


class Linear:
    """y = x W^T + b with W [sum(out_sizes), in_size]. `names` are the checkpoint's names of the parts, in order."""

    def __init__(
        self, in_size: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = parts
        self._packed: Tensor | None = None
        self.weight = torch.empty(sum(parts.values()), in_size, dtype=dtype, device=device)
        self.bias = torch.empty(sum(parts.values()), dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in_size] -> [n, sum(out_sizes)]"""
        return linear(x, self.weight, self.bias, self._packed)

    def pack(self) -> None:
        """The weights are loaded: bring them into the fastest layout and drop the plain one."""
        self._packed = pack(self.weight)
        if self._packed is not None:
            self.weight = self.weight.new_empty(0)

    def checkpoint(self) -> dict[str, Tensor]:
        """Checkpoint name -> the part of a parameter that it fills."""
        found, start = dict[str, Tensor](), 0
        for name, size in self._parts.items():
            found[f"{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                found[f"{name}.bias"] = self.bias[start : start + size]
            start += size
        return found
