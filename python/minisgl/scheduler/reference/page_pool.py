"""The free pages of the KV pool: a stack, so that the order in which pages are given out is specified.

Invariants: a page is on the stack at most once; at start, and after `reset`, the lowest page is on top.
"""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.scheduler.api import ControlPlaneError


class PagePool:
    """Pages 0 .. num_pages - 1 of `page_size` tokens each."""

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
        """All pages are free again, stacked as at start."""
        self._free[:] = range(self.num_pages - 1, -1, -1)

    def pop(self) -> int:
        """Take the page on top. The caller has made sure that there is one."""
        if not self._free:
            raise ControlPlaneError("a page was taken from an empty pool")
        return self._free.pop()

    def push(self, pages: Iterable[int]) -> None:
        """Free `pages`, in order: the last of them is given out first."""
        self._free.extend(pages)
        if len(self._free) > self.num_pages:
            raise ControlPlaneError(f"{len(self._free)} pages are free, the pool has {self.num_pages}")

    def free_pages(self) -> list[int]:
        """A copy of the stack, the next page to be given out last."""
        return list(self._free)
