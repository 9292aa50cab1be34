"""Freed memory goes back to the system.

glibc's allocator keeps what is freed, above all in the arenas of other threads than the first, and raises by itself the
size from which a block is mapped, and so given back, for itself.

With another allocator nothing happens. The extension has one of its own, mimalloc, which is told the same by the
environment (`envs.keep_little`).
"""

from __future__ import annotations

import ctypes
from functools import cache

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
MAPPED_BYTES = 1 << 20  # a block from this size on is mapped for itself
MAX_ARENAS = 2


@cache
def _libc() -> ctypes.CDLL | None:
    found = ctypes.CDLL(None)
    return found if hasattr(found, "malloc_trim") and hasattr(found, "mallopt") else None


def keep_little() -> None:
    """Once, before threads are started."""
    if (libc := _libc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(_M_ARENA_MAX, MAX_ARENAS)


def give_back() -> None:
    """What is free now. Other threads run meanwhile."""
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)
