"""The interface of a rank to its group: rank and size, and the few collectives that a sharded model needs.

Invariants: every rank calls the same collectives in the same order; a rank whose peer has exited gets `GroupError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GroupError(Exception):
    """Error of a collective: a peer has exited, or the ranks are out of step. The group cannot be used any more."""


class Group(Protocol):
    """A group of ranks. Tensors are contiguous, of the same shape and dtype on every rank, on the group's device."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place, with the same bits on every rank; integers wrap. Returns `tensor`."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's values to every rank, in place. Returns `tensor`."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks by rank on rank 0, an empty list on the others."""

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the ranks' values, on every rank. Blocks until all ranks have called it."""

    def abort(self) -> None:
        """End the collectives that this rank waits in, with an error or with wrong values, and refuse all later ones,
        after a peer has exited. Callable from any thread; returns at once."""

    def close(self) -> None:
        """Close the group, after graphs with its collectives are freed. Idempotent; takes seconds at most."""


class _Alone:
    """A group of one rank, whose collectives are the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def all_reduce_min(self, value: int) -> int:
        return value

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE: Group = _Alone()
