"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.weight.shape[0],), self.weight, self._eps)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"{self._name}.weight": self.weight}
