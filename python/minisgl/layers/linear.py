"""Linear layers, one or several of a checkpoint side by side; each rank holds its outputs, or its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minisgl.distributed import Cut, Group, Shard
from minisgl.layers.adapters import AdapterRows, Adapters, Factors
from minisgl.layers.products import linear, pack


class Linear:
    """y = x W^T + b with W [sum(out_sizes), in_size]. `parts` are the checkpoint's names in order with the outputs
    that are held here, a number for all."""

    def __init__(
        self, in_size: int, parts: Mapping[str, int | Cut], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = {name: Cut.all(part) if isinstance(part, int) else part for name, part in parts.items()}
        out_size = sum(part.length for part in self._parts.values())
        self._packed: Tensor | None = None
        self._adapters: Adapters | None = None
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in_size] -> [n, sum(out_sizes)]"""
        y = linear(x, self.weight, self.bias, self._packed)
        if self._adapters is not None:
            self._adapters.add_to(y, x)
        return y

    def names(self) -> list[str]:
        """The names of the layers that lie side by side here, as a checkpoint has them."""
        return list(self._parts)

    def put_adapter(self, rows: AdapterRows, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """`pairs`: A [r, in_size] and B [its whole outputs, r], scaled, of some of `names`."""
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
        """No-op for one that has no part here."""
        if self._adapters is not None and not self._adapters.drop(number):
            self._adapters = None

    def pack(self) -> None:
        """The weights are loaded: bring them into the fastest layout and drop the plain one."""
        self._packed = pack(self.weight)
        if self._packed is not None:
            self.weight = self.weight.new_empty(0)

    def checkpoint(self) -> dict[str, Tensor]:
        """Checkpoint name -> the part of a parameter that it fills."""
        found, start = dict[str, Tensor](), 0
        for name, part in self._parts.items():
            found[f"{name}.weight"] = self.weight[start : start + part.length]
            if self.bias is not None:
                found[f"{name}.bias"] = self.bias[start : start + part.length]
            start += part.length
        return found

    def shards(self) -> dict[str, Shard]:
        """What of a checkpoint's tensor is held here, for those that are not held whole."""
        kinds = ("weight", "bias") if self.bias is not None else ("weight",)
        return {
            f"{name}.{kind}": Shard(0, (part,))
            for name, part in self._parts.items()
            for kind in kinds
            if part.length < part.whole
        }


class RowLinear:
    """y = x W^T + b where a rank has the inputs `inputs` of x and W; everyone gets all of y."""

    def __init__(
        self,
        group: Group,
        inputs: Cut,
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
        """[n, inputs.length] -> [n, out_size]"""
        y = self._linear(x)
        if self._group.size > 1:
            self._group.all_reduce(y)
            if self._bias is not None:
                y += self._bias
        return y

    def names(self) -> list[str]:
        return [self._name]

    def put_adapter(self, rows: AdapterRows, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """`pairs`: A [r, its whole inputs] and B [out_size, r]. Each rank has a share of the sum over the inputs."""
        ((a, b),) = pairs.values()
        mine = a.narrow(1, self._inputs.start, self._inputs.length)
        self._linear.put_adapter(rows, number, {self._name: (mine, b)})

    def drop_adapter(self, number: int) -> None:
        self._linear.drop_adapter(number)

    def pack(self) -> None:
        self._linear.pack()

    def checkpoint(self) -> dict[str, Tensor]:
        found = self._linear.checkpoint()
        if self._bias is not None:
            found[f"{self._name}.bias"] = self._bias
        return found

    def shards(self) -> dict[str, Shard]:
        return {f"{self._name}.weight": Shard(1, (self._inputs,))} if self._group.size > 1 else {}
