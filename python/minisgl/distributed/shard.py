"""Sharding of a dimension among ranks, and the part of a checkpoint's tensor that a parameter holds.

Invariants: the ranges of all ranks cover a dimension in order, each index once (except replicated heads).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A range `start` .. `start + length` of the indexes of a dimension of size `whole`."""

    start: int
    length: int
    whole: int

    @classmethod
    def all(cls, size: int) -> ShardRange:
        return cls(0, size, size)

    @classmethod
    def of(cls, size: int, rank: int, ranks: int) -> ShardRange:
        """Return the range of `rank`: equal parts, rounded up; the last ones may be shorter, or empty."""
        step = -(-size // ranks)
        start = min(rank * step, size)
        return cls(start, min(step, size - start), size)

    @classmethod
    def of_kv_heads(cls, heads: int, rank: int, ranks: int) -> ShardRange:
        """Return the range of KV heads of `rank`: equal parts; with fewer heads than ranks neighbours share one."""
        return cls.of(heads, rank, ranks) if heads >= ranks else cls(rank * heads // ranks, 1, heads)

    def times(self, factor: int) -> ShardRange:
        """Return the range scaled by `factor`, such as from heads to their values."""
        return ShardRange(self.start * factor, self.length * factor, self.whole * factor)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a checkpoint's (possibly concatenated) tensor that a parameter holds: ranges of dimension `dim`."""

    dim: int
    parts: tuple[ShardRange, ...]

    @property
    def whole(self) -> int:
        return sum(part.whole for part in self.parts)

    def ranges(self) -> list[tuple[int, int]]:
        """Return (first index, count) in the checkpoint's dimension, the concatenation of the whole parts."""
        ranges, base = list[tuple[int, int]](), 0
        for part in self.parts:
            ranges.append((base + part.start, part.length))
            base += part.whole
        return ranges
