"""Linear layers, single or fused from several of a checkpoint; sharded over ranks by outputs or by inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.distributed import Group, Shard, ShardRange
from minisgl.layers.adapters import AdapterRows, Adapters, Factors
from minisgl.layers.products import linear, pack


class Linear:
    """A linear layer with W [sum(out_sizes), in_size]. `parts`: the outputs held here by checkpoint name, or their
    count."""

    def __init__(
        self,
        in_size: int,
        parts: Mapping[str, int | ShardRange],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parts = {name: ShardRange.all(part) if isinstance(part, int) else part for name, part in parts.items()}
        out_size = sum(part.length for part in self._parts.values())
        self._packed: Tensor | None = None
        self._adapters: Adapters | None = None
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [n, sum(out_sizes)] of x [n, in_size], with adapters."""
        y = linear(x, self.weight, self.bias, self._packed)
        if self._adapters is not None:
            self._adapters.add_to(y, x)
        return y

    def names(self) -> list[str]:
        """Return the checkpoint's names of the layers that are fused here."""
        return list(self._parts)

    def put_adapter(self, rows: AdapterRows, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Load adapter `number`: `pairs` are A [r, in_size] and scaled B [unsharded outputs, r] of some of `names`."""
        ranks = [len(pairs[name][0]) if name in pairs else 0 for name in self._parts]
        out_sizes = [part.length for part in self._parts.values()]
        b = self.weight.new_zeros(sum(out_sizes), sum(ranks))
        row = column = 0
        for (name, part), rank in zip(self._parts.items(), ranks, strict=True):
            if rank:
                b[row : row + part.length, column : column + rank] = pairs[name][1].narrow(0, part.start, part.length)
            row, column = row + part.length, column + rank
        a = torch.cat([pairs[name][0] for name in self._parts if name in pairs]).to(self.weight)
        self._adapters = self._adapters or Adapters(rows, out_sizes)
        self._adapters.put(number, Factors(a, b, tuple(ranks)))

    def drop_adapter(self, number: int) -> None:
        """Remove adapter `number`; does nothing if it does not change this layer."""
        if self._adapters is not None and not self._adapters.drop(number):
            self._adapters = None

    def pack(self) -> None:
        """Convert the loaded weights to the fastest layout and free the plain ones."""
        self._packed = pack(self.weight)
        if self._packed is not None:
            self.weight = self.weight.new_empty(0)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return, by checkpoint name, the part of a parameter that the tensor fills."""
        tensors, start = dict[str, Tensor](), 0
        for name, part in self._parts.items():
            tensors[f"{name}.weight"] = self.weight[start : start + part.length]
            if self.bias is not None:
                tensors[f"{name}.bias"] = self.bias[start : start + part.length]
            start += part.length
        return tensors

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of each checkpoint tensor that it does not hold whole."""
        kinds = ("weight", "bias") if self.bias is not None else ("weight",)
        return {
            f"{name}.{kind}": Shard(0, (part,))
            for name, part in self._parts.items()
            for kind in kinds
            if part.length < part.whole
        }


class RowLinear:
    """A linear layer y = x W^T + b sharded by input: a rank has columns `inputs` of x and W; all get the whole y."""

    def __init__(
        self,
        group: Group,
        inputs: ShardRange,
        name: str,
        out_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._inputs = inputs
        self._name = name
        # with one rank the bias is part of the product
        self._linear = Linear(
            inputs.length, {name: out_size}, bias=bias and group.size == 1, dtype=dtype, device=device
        )
        self._bias = torch.empty(out_size, dtype=dtype, device=device) if bias and group.size > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [n, out_size] of this rank's inputs, [n, inputs.length]. All ranks call it (all-reduce)."""
        y = self._linear(x)
        if self._group.size > 1:
            self._group.all_reduce(y)
            if self._bias is not None:
                y += self._bias
        return y

    def names(self) -> list[str]:
        return [self._name]

    def put_adapter(self, rows: AdapterRows, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Load adapter `number`; `pairs`: A [r, unsharded inputs], B [out_size, r]. A rank computes a partial sum."""
        ((a, b),) = pairs.values()
        a_columns = a.narrow(1, self._inputs.start, self._inputs.length)
        self._linear.put_adapter(rows, number, {self._name: (a_columns, b)})

    def drop_adapter(self, number: int) -> None:
        self._linear.drop_adapter(number)

    def pack(self) -> None:
        self._linear.pack()

    def checkpoint(self) -> dict[str, Tensor]:
        tensors = self._linear.checkpoint()
        if self._bias is not None:
            tensors[f"{self._name}.bias"] = self._bias
        return tensors

    def shards(self) -> dict[str, Shard]:
        return {f"{self._name}.weight": Shard(1, (self._inputs,))} if self._group.size > 1 else {}
