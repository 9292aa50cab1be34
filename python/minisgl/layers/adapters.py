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


class AdapterRows:
    """The tokens of the step that is being computed, by adapter: one object for all layers of a model."""

    __slots__ = ("groups", "order")

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.order: Tensor | None = None  # [m] int64, tokens with an adapter, those of one side by side; None: all are

    def clear(self) -> None:
        """No token has one."""
        self.groups, self.order = [], None

    def set(self, adapters: npt.NDArray[np.int64], device: torch.device) -> None:
        """`adapters` [n]: by token, 0: none; not all."""
        order = np.argsort(adapters, kind="stable")
        order = order[np.count_nonzero(adapters == 0) :]
        numbers, starts = np.unique(adapters[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        self.groups = [Group(*one) for one in zip(numbers.tolist(), starts.tolist(), ends, strict=True)]
        is_all = len(self.groups) == 1 and len(order) == len(adapters)
        self.order = None if is_all else torch.from_numpy(order).to(device)


@dataclass(frozen=True, slots=True)
class Factors:
    """A [r, in] of one or several layers side by side, and B [out, r] with its scale in it, nothing between them."""

    a: Tensor
    b: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.a), self.b)


class Adapters:
    """Those of one linear layer, by number."""

    __slots__ = ("_rows", "by_number")

    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self.by_number: dict[int, Factors] = {}

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """x [n, in], y [n, out], which is changed."""
        groups, order = self._rows.groups, self._rows.order
        if not groups:
            return
        if order is None:
            if (factors := self.by_number.get(groups[0].adapter)) is not None:
                y += factors(x)
            return
        sorted_x = x[order]
        more = y.new_zeros(len(order), y.shape[1])
        for group in groups:
            if (factors := self.by_number.get(group.adapter)) is not None:
                more[group.start : group.end] = factors(sorted_x[group.start : group.end])
        y.index_add_(0, order, more)
