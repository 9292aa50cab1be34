"""Root mean square normalization, RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """Computes x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension; with an `offset` in float32."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        self._name = name
        self._eps = eps
        self._offset = offset
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._offset:
            weight = self.weight.float() + self._offset
            return F.rms_norm(x.float(), tuple(weight.shape), weight, self._eps).to(x.dtype)
        return F.rms_norm(x, (self.weight.shape[0],), self.weight, self._eps)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"{self._name}.weight": self.weight}
