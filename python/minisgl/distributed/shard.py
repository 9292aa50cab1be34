"""How a dimension is cut among ranks, and which part of a checkpoint's tensor a parameter holds.

Invariants: the cuts of all ranks cover a dimension in order, each index once (except heads that are replicated).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """The indices `start` .. `start + length` of a dimension of `whole`."""

    start: int
    length: int
    whole: int

    @classmethod
    def all(cls, size: int) -> Cut:
        return cls(0, size, size)

    @classmethod
    def of(cls, size: int, rank: int, ranks: int) -> Cut:
        """Equal parts, rounded up; what lies at the end may be shorter, or empty."""
        step = -(-size // ranks)
        start = min(rank * step, size)
        return cls(start, min(step, size - start), size)

    @classmethod
    def of_kv_heads(cls, heads: int, rank: int, ranks: int) -> Cut:
        """Equal parts; with fewer heads than ranks each rank holds one, and neighbours hold the same."""
        return cls.of(heads, rank, ranks) if heads >= ranks else cls(rank * heads // ranks, 1, heads)

    def times(self, factor: int) -> Cut:
        """From heads to their values."""
        return Cut(self.start * factor, self.length * factor, self.whole * factor)


@dataclass(frozen=True, slots=True)
class Shard:
    """What a parameter holds of a checkpoint's tensor: `cuts` of its dimension `dim`, one after the other. More than
    one if the tensor itself has several things side by side."""

    dim: int
    cuts: tuple[Cut, ...]

    @property
    def whole(self) -> int:
        return sum(cut.whole for cut in self.cuts)

    def ranges(self) -> list[tuple[int, int]]:
        """(first index, count) in the checkpoint's dimension. Several cuts: the dimension holds their wholes side by
        side."""
        found, base = list[tuple[int, int]](), 0
        for cut in self.cuts:
            found.append((base + cut.start, cut.length))
            base += cut.whole
        return found
