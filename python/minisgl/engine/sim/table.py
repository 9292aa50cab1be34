"""Measured step latencies, over a grid of (rows, tokens beyond one a row, mean length of a row).

At a grid point the time is the measured one; between points it is linear along each axis; beyond the last point of an
axis its last slope goes on, before the first its first.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right

import msgspec

from minisgl.config import ConfigError


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ms[i][j][k]`: milliseconds of a step with `rows[i]` rows, `prefill_tokens[j]` tokens more than rows, and rows
    that are `kv_len[k]` tokens long on average after the step. Axes ascend; one with a single point has no effect."""

    rows: tuple[float, ...]
    prefill_tokens: tuple[float, ...]
    kv_len: tuple[float, ...]
    ms: tuple[tuple[tuple[float, ...], ...], ...]

    def seconds(self, rows: int, tokens: int, kv_tokens: int) -> float:
        """`tokens` and `kv_tokens` of all rows together."""
        i, x = _place(self.rows, rows)
        j, y = _place(self.prefill_tokens, tokens - rows)
        k, z = _place(self.kv_len, kv_tokens / rows if rows else 0.0)
        total = 0.0
        for di, wx in ((0, 1.0 - x), (1, x)):
            for dj, wy in ((0, 1.0 - y), (1, y)):
                for dk, wz in ((0, 1.0 - z), (1, z)):
                    if weight := wx * wy * wz:
                        total += weight * self.ms[i + di][j + dj][k + dk]
        return max(total, 0.0) / 1e3

    def check(self) -> None:
        """Raise `ConfigError` unless the grid is whole."""
        for name in ("rows", "prefill_tokens", "kv_len"):
            axis = getattr(self, name)
            if not axis or any(not low < high for low, high in itertools.pairwise(axis)):
                raise ConfigError(f"table.{name}: {list(axis)}: must be one or more ascending numbers")
        for i, plane in enumerate(self.ms):
            for j, line in enumerate(plane):
                if len(line) != len(self.kv_len) or any(not 0 <= ms < math.inf for ms in line):
                    raise ConfigError(f"table.ms[{i}][{j}]: must be {len(self.kv_len)} times, 0 or more")
            if len(plane) != len(self.prefill_tokens):
                raise ConfigError(f"table.ms[{i}]: has {len(plane)} lists, prefill_tokens {len(self.prefill_tokens)}")
        if len(self.ms) != len(self.rows):
            raise ConfigError(f"table.ms: has {len(self.ms)} lists, rows has {len(self.rows)} points")


def _place(axis: tuple[float, ...], at: float) -> tuple[int, float]:
    """The cell's first index, and how far in it `at` lies: 0 to 1 inside, anything beyond the ends."""
    if len(axis) == 1:
        return 0, 0.0
    low = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    return low, (at - axis[low]) / (axis[low + 1] - axis[low])
