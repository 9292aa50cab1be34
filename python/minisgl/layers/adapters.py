"""LoRA adapters of linear layers: y + B (A x), with a different A and B for each token, or none.

Invariants: a token's result does not depend on the adapters of other tokens, except for the rounding of products of
another size; a step without adapters costs one check a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.layers.products import add_linear, linear


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """The tokens of one adapter: `start` .. `end` of the tokens sorted by adapter."""

    adapter: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sorted tokens in blocks of equal size, one for each of `adapters`, for batched products."""

    adapters: tuple[int, ...]
    tokens: Tensor  # [blocks, size] int64; short ones are padded with any token
    places: Tensor | None  # [m] int64, index of each sorted token in the flattened blocks; None: they are equal


class AdapterRows:
    """The tokens of the current step, by adapter: one object for all layers of a model."""

    __slots__ = ("blocks", "groups", "order")

    def __init__(self) -> None:
        self.groups: list[TokenGroup] = []
        # [m] int64, tokens with an adapter, sorted by it; None: all tokens have the same
        self.order: Tensor | None = None
        self.blocks: Blocks | None = None  # only if blocks hold little more than the groups

    def clear(self) -> None:
        """Set that no token has an adapter."""
        self.groups, self.order, self.blocks = [], None, None

    def set(self, adapters: npt.NDArray[np.int64], device: torch.device) -> None:
        """Set the adapter id of each token: `adapters` [n], 0 for none; at least one must not be 0."""
        order = np.argsort(adapters, kind="stable")
        order = order[np.count_nonzero(adapters == 0) :]
        numbers, starts = np.unique(adapters[order], return_index=True)
        ends = np.append(starts[1:], len(order))
        bounds = zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True)
        self.groups = [TokenGroup(*bound) for bound in bounds]
        is_all = len(self.groups) == 1 and len(order) == len(adapters)
        self.order = None if is_all else torch.from_numpy(order).to(device)
        self.blocks = None
        size = int((ends - starts).max())
        if len(numbers) > 1 and size * len(numbers) <= 2 * len(order):
            columns = np.arange(size)
            tokens = order[np.minimum(starts[:, None] + columns, len(order) - 1)]
            places = None
            if tokens.size > len(order):
                filled = np.flatnonzero((starts[:, None] + columns < ends[:, None]).ravel())
                places = torch.from_numpy(filled).to(device)
            self.blocks = Blocks(tuple(numbers.tolist()), torch.from_numpy(tokens).to(device), places)


@dataclass(frozen=True, slots=True)
class Factors:
    """LoRA factors of the fused parts of a linear layer: A [sum of ranks, in], and B [sum of out, sum of ranks] with
    the scale applied, block-diagonal by part; a part without adapter has rank 0."""

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add B A x to y in place; x [n, in], y [n, sum of out]."""
        add_linear(y, linear(x, self.a), self.b)


@dataclass(frozen=True, slots=True)
class Stack:
    """LoRA factors of several adapters, zero-padded to the largest rank, by part: A [blocks, in, rank], B [blocks,
    rank, out]. (Measured: products with three A of rank 16 concatenated take twice as long as three separate ones.)"""

    adapters: tuple[int, ...]
    parts: tuple[tuple[Tensor, Tensor], ...]

    @staticmethod
    def of(
        adapters: tuple[int, ...], factors_by_block: Sequence[Factors | None], x: Tensor, out_sizes: Sequence[int]
    ) -> Stack:
        """Stack the factors of `adapters`; `x` [n, in] gives size, dtype and device."""
        present = [(block, factors) for block, factors in enumerate(factors_by_block) if factors is not None]
        ranks = [max((factors.ranks[i] for _, factors in present), default=0) for i in range(len(out_sizes))]
        parts = tuple(
            (x.new_zeros(len(factors_by_block), x.shape[1], rank), x.new_zeros(len(factors_by_block), rank, out))
            for rank, out in zip(ranks, out_sizes, strict=True)
        )
        for block, factors in present:
            at = out = 0
            for (a, b), rank, size in zip(parts, factors.ranks, out_sizes, strict=True):
                a[block, :, :rank] = factors.a[at : at + rank].T
                b[block, :rank] = factors.b[out : out + size, at : at + rank].T
                at, out = at + rank, out + size
        return Stack(adapters, parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute B A x for all blocks: [blocks, size, in] -> [blocks, size, sum of out]."""
        outputs = [torch.bmm(torch.bmm(x, a), b) for a, b in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


class Adapters:
    """The adapters of one linear layer with these `out_sizes`, by id."""

    __slots__ = ("_by_number", "_out_sizes", "_rows", "_stack")

    def __init__(self, rows: AdapterRows, out_sizes: Sequence[int]) -> None:
        self._rows = rows
        self._out_sizes = tuple(out_sizes)
        self._by_number: dict[int, Factors] = {}
        self._stack: Stack | None = None  # of the last step's blocks

    def put(self, number: int, factors: Factors) -> None:
        self._by_number[number] = factors
        self._stack = None

    def drop(self, number: int) -> bool:
        """Remove an adapter. Returns whether others are left."""
        self._by_number.pop(number, None)
        self._stack = None
        return bool(self._by_number)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add to y, in place, the adapter output of each token; x [n, in], y [n, sum of out]."""
        groups, order, blocks = self._rows.groups, self._rows.order, self._rows.blocks
        if not groups:
            return
        if order is None:
            if (factors := self._by_number.get(groups[0].adapter)) is not None:
                factors.add_to(y, x)
            return
        if blocks is not None:
            # measured: index_select takes a quarter of the time of indexing with brackets
            x_blocks = x.index_select(0, blocks.tokens.view(-1)).view(*blocks.tokens.shape, -1)
            more = self._stacked(blocks.adapters, x)(x_blocks).view(-1, y.shape[1])
            y.index_add_(0, order, more if blocks.places is None else more.index_select(0, blocks.places))
            return
        sorted_x = x.index_select(0, order)
        more = y.new_zeros(len(order), y.shape[1])
        for group in groups:
            if (factors := self._by_number.get(group.adapter)) is not None:
                factors.add_to(more[group.start : group.end], sorted_x[group.start : group.end])
        y.index_add_(0, order, more)

    def _stacked(self, adapters: tuple[int, ...], x: Tensor) -> Stack:
        if self._stack is None or self._stack.adapters != adapters:
            self._stack = Stack.of(adapters, [self._by_number.get(adapter) for adapter in adapters], x, self._out_sizes)
        return self._stack
