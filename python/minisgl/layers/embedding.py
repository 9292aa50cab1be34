"""Token embeddings, and the output head that may share their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """A [vocab_size, size] table, read by row (`__call__`) or used as the output head (`logits`)."""

    def __init__(self, name: str, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self.weight = torch.empty(vocab_size, size, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """[n] int64 -> [n, size]"""
        return F.embedding(ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, size] -> [n, vocab_size]"""
        return F.linear(hidden, self.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"{self._name}.weight": self.weight}
