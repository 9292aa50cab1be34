"""Adapters beside linear layers: y + B (A x), for each token with its own A and B, or none.

Keeps true: what a token gets does not depend on the adapters of other tokens, but for the rounding of products of
another size; a step without adapters costs one look a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.layers.packing import linear


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens `start` .. `end` of those that are sorted by adapter."""

    adapter: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The same tokens in blocks of one size, a block for each of `adapters`: for products of all at once."""

    adapters: tuple[int, ...]
    tokens: Tensor  # [blocks, size] int64; short ones are filled up with any token
    places: Tensor  # [m] int64, where in the flattened blocks the sorted tokens are


class AdapterRows:
    """The tokens of the step that is being computed, by adapter: one object for all layers of a model."""

    __slots__ = ("blocks", "groups", "order")

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.order: Tensor | None = None  # [m] int64, tokens with an adapter, those of one side by side; None: all are
        self.blocks: Blocks | None = None  # where blocks would hold little more than the groups

    def clear(self) -> None:
        """No token has one."""
        self.groups, self.order, self.blocks = [], None, None

    def set(self, adapters: npt.NDArray[np.int64], device: torch.device) -> None:
        """`adapters` [n]: by token, 0: none; not all."""
        order = np.argsort(adapters, kind="stable")
        order = order[np.count_nonzero(adapters == 0) :]
        numbers, starts = np.unique(adapters[order], return_index=True)
        ends = np.append(starts[1:], len(order))
        bounds = zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
        self.groups = [Group(*one) for one in bounds]
        is_all = len(self.groups) == 1 and len(order) == len(adapters)
        self.order = None if is_all else torch.from_numpy(order).to(device)
        self.blocks = None
        size = int((ends - starts).max())
        if len(numbers) > 1 and size * len(numbers) <= 2 * len(order):
            columns = np.arange(size)
            tokens = order[np.minimum(starts[:, None] + columns, len(order) - 1)]
            places = np.flatnonzero((starts[:, None] + columns < ends[:, None]).ravel())
            on_device = torch.from_numpy(tokens).to(device), torch.from_numpy(places).to(device)
            self.blocks = Blocks(tuple(numbers.tolist()), *on_device)


@dataclass(frozen=True, slots=True)
class Factors:
    """A [r, in] of one or several layers side by side, and B [out, r] with its scale in it, nothing between them."""

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.a), self.b)


class Adapters:
    """Those of one linear layer, by number."""

    __slots__ = ("_by_number", "_rows", "_stack")

    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self._by_number: dict[int, Factors] = {}
        self._stack: tuple[tuple[int, ...], Tensor, Tensor] | None = None  # of the blocks of the last step

    def put(self, number: int, factors: Factors) -> None:
        self._by_number[number] = factors

    def drop(self, number: int) -> bool:
        """Whether others are left."""
        self._by_number.pop(number, None)
        self._stack = None
        return bool(self._by_number)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """x [n, in], y [n, out], which is changed."""
        groups, order, blocks = self._rows.groups, self._rows.order, self._rows.blocks
        if not groups:
            return
        if order is None:
            if (factors := self._by_number.get(groups[0].adapter)) is not None:
                y += factors(x)
            return
        if blocks is not None:
            a, b = self._stacked(blocks.adapters, x.shape[1], y)
            products = torch.bmm(torch.bmm(x[blocks.tokens], a), b)
            y.index_add_(0, order, products.view(-1, y.shape[1])[blocks.places])
            return
        sorted_x = x[order]
        more = y.new_zeros(len(order), y.shape[1])
        for group in groups:
            if (factors := self._by_number.get(group.adapter)) is not None:
                more[group.start : group.end] = factors(sorted_x[group.start : group.end])
        y.index_add_(0, order, more)

    def _stacked(self, adapters: tuple[int, ...], in_size: int, y: Tensor) -> tuple[Tensor, Tensor]:
        """A [blocks, in, r] and B [blocks, r, out], with zeros up to the largest rank."""
        if self._stack is None or self._stack[0] != adapters:
            found = [self._by_number.get(number) for number in adapters]
            rank = max((len(factors.a) for factors in found if factors is not None), default=1)
            a, b = y.new_zeros(len(found), in_size, rank), y.new_zeros(len(found), rank, y.shape[1])
            for place, factors in enumerate(found):
                if factors is not None:
                    a[place, :, : len(factors.a)] = factors.a.T
                    b[place, : len(factors.a)] = factors.b.T
            self._stack = adapters, a, b
        return self._stack[1:]
