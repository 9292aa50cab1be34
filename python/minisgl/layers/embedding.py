"""Token embeddings, and the output head that may share their weights; each rank holds a part of the vocabulary.

Keeps true: logits are float32, products of the weights as they are, summed in float32: in bfloat16 those of likely
tokens would lie on steps of 0.125, and the likeliest two would often be equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.distributed import ALONE, Cut, Group, Shard

_WIDE_BYTES = 4 * 2**20  # of the table that are float32 at once: they are still in a cache when they are multiplied


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
        self._ids = Cut.of(vocab_size, group.rank, group.size)
        self._wide: Tensor | None = None
        self.weight = torch.empty(self._ids.length, size, dtype=dtype, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """[n] int64 -> [n, size]"""
        if self._group.size == 1:
            return F.embedding(ids, self.weight)
        here = ids - self._ids.start
        elsewhere = (here < 0) | (here >= self._ids.length)
        found = F.embedding(here.masked_fill(elsewhere, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, size] -> [n, vocab_size] float32; ranks above 0 give their part and get zeros, a view of one number."""
        part = float32_product(hidden, self.weight if self._wide is None else self._wide)
        if self._group.size == 1:
            return part
        longest = Cut.of(self._ids.whole, 0, self._group.size).length
        parts = self._group.gather(F.pad(part, (0, longest - self._ids.length)).contiguous())
        if not parts:
            return part.new_zeros(1).expand(len(hidden), self._ids.whole)
        return torch.cat(parts, 1)[:, : self._ids.whole]

    def pack(self, *, read: bool) -> None:
        """The weights are loaded and `logits` will be asked. A CPU multiplies no halves into float32, so it gets a
        float32 copy; the table itself stays only if it will be `read`."""
        if self.weight.device.type == "cpu" and self.weight.dtype is not torch.float32:
            self._wide = self.weight.float()
            if not read:
                self.weight = self.weight.new_empty(0)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"{self._name}.weight": self.weight}

    def shards(self) -> dict[str, Shard]:
        return {f"{self._name}.weight": Shard(0, (self._ids,))} if self._group.size > 1 else {}


def float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] of the dtype of `weight` [out, in], or of another if that is float32 -> [n, out] float32."""
    if weight.dtype is torch.float32:
        return F.linear(x.float(), weight)
    if weight.device.type == "cuda" and "dtype" in torch.ops.aten.mm.overloads():  # since torch 2.8
        product: Tensor = torch.ops.aten.mm.dtype(x, weight.t(), torch.float32)
        return product
    x = x.float()
    at_once = max(1, _WIDE_BYTES // (4 * weight.shape[1]))
    wide, out = x.new_empty(at_once, weight.shape[1]), x.new_empty(len(x), len(weight))
    for at in range(0, len(weight), at_once):
        part = weight[at : at + at_once]
        torch.mm(x, wide[: len(part)].copy_(part).t(), out=out[:, at : at + len(part)])
    return out
