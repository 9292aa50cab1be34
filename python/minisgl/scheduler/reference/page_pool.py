"""The free pages of the KV pool: a stack, so that the allocation order is specified.

Invariants: a page is on the stack at most once; at start, and after `reset`, the lowest page is on top.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.scheduler.api import ControlPlaneError


class PagePool:
    """Allocator of the pages 0 .. num_pages - 1."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages}: at least 1")
        self.num_pages = num_pages
        self._free: list[int] = []
        self.reset()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        """Free all pages; the lowest is on top again."""
        self._free[:] = range(self.num_pages - 1, -1, -1)

    def pop(self) -> int:
        """Allocate the page on top of the stack. Raises `ControlPlaneError` if there is none: callers check before."""
        if not self._free:
            raise ControlPlaneError("a page was taken from an empty pool")
        return self._free.pop()

    def push(self, pages: Iterable[int]) -> None:
        """Free `pages`, in order: the last of them is allocated first."""
        self._free.extend(pages)
        if len(self._free) > self.num_pages:
            raise ControlPlaneError(f"{len(self._free)} pages are free, the pool has {self.num_pages}")

    def free_pages(self) -> list[int]:
        """Return a copy of the stack; the next page to be allocated is last."""
        return list(self._free)
