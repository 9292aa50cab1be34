"""Token embeddings, and the output head that may share their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.packing import linear, pack


class Embedding:
    """A [vocab_size, size] table, read by row (`__call__`) or used as the output head (`logits`)."""

    def __init__(self, name: str, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._packed: Tensor | None = None
        self.weight = torch.empty(vocab_size, size, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """[n] int64 -> [n, size]"""
        return F.embedding(ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, size] -> [n, vocab_size]"""
        return linear(hidden, self.weight, packed=self._packed if hidden.shape[0] > 1 else None)

    def pack(self) -> None:
        """The weights are loaded and `logits` will be asked: a packed copy beside the table, which stays for
        lookups."""
        self._packed = pack(self.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"{self._name}.weight": self.weight}
