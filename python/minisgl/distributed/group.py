"""What a rank knows of its group: which rank it is, and the few collectives that a sharded model needs.

Invariants: every rank calls the same collectives in the same order; a rank whose peer is gone gets `GroupError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class GroupError(Exception):
    """A collective failed: a peer is gone, or the ranks are out of step. The group is of no use any more."""


class Group(Protocol):
    """Tensors are contiguous, of the same shape and dtype on every rank, on the device the group was made for."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place, bit for bit the same everywhere; integers wrap. Returns `tensor`."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's values for everyone, in place. Returns `tensor`."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """By rank, on rank 0; elsewhere nothing."""

    def least(self, value: int) -> int:
        """The smallest of the ranks' values, for everyone. Waits for all ranks."""

    def abort(self) -> None:
        """A peer is gone: end the collectives that this rank waits in, with an error or with wrong values, and refuse
        all later ones. From any thread; returns at once."""

    def close(self) -> None:
        """After graphs with its collectives are freed. Idempotent, takes seconds at most."""


class _Alone:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def least(self, value: int) -> int:
        return value

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE: Group = _Alone()
