"""Token embeddings, and the output head that may share their weights; each rank holds a part of the vocabulary.

Invariants: logits are float32, products of the unconverted weights, summed in float32: in bfloat16 those of likely
tokens would be multiples of 0.125, and the two likeliest would often be equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import ALONE, Group, Shard, ShardRange
from minisgl.layers.products import WideProduct, wide_product


class Embedding:
    """A [vocab_size, size] table, read by row (`__call__`) or used as the output head (`logits`)."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self._name = name
        self._group = group
        self._ids = ShardRange.of(vocab_size, group.rank, group.size)
        self._wide: WideProduct | Tensor | None = None
        self.weight = torch.empty(self._ids.length, size, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the embeddings [n, size] of ids [n] int64."""
        if self._group.size == 1:
            return F.embedding(ids, self.weight)
        here = ids - self._ids.start
        elsewhere = (here < 0) | (here >= self._ids.length)
        rows = F.embedding(here.masked_fill(elsewhere, 0), self.weight)
        return self._group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] float32 of hidden [n, size], on rank 0. Other ranks get zeros (stride 0)."""
        if isinstance(self._wide, WideProduct):
            part = self._wide(hidden)
        else:
            part = wide_product(hidden, self.weight if self._wide is None else self._wide)
        if self._group.size == 1:
            return part
        longest = ShardRange.of(self._ids.whole, 0, self._group.size).length
        parts = self._group.gather(F.pad(part, (0, longest - self._ids.length)).contiguous())
        if not parts:
            return part.new_zeros(1).expand(len(hidden), self._ids.whole)
        return torch.cat(parts, 1)[:, : self._ids.whole]

    def pack(self, *, read: bool) -> None:
        """Prepare `logits`, after the weights are loaded. A CPU multiplies by a copy of bf16 or float16 weights: in the
        layout of the kernels, or in float32. The table itself stays only if it will be `read`."""
        if self.weight.device.type == "cpu" and self.weight.dtype is not torch.float32:
            self._wide = WideProduct(self.weight) if WideProduct.serves(self.weight) else self.weight.float()
            if not read:
                self.weight = self.weight.new_empty(0)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"{self._name}.weight": self.weight}

    def shards(self) -> dict[str, Shard]:
        return {f"{self._name}.weight": Shard(0, (self._ids,))} if self._group.size > 1 else {}
