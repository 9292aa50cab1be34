"""The free pages: a stack in a specified order."""

from __future__ import annotations

import pytest

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.reference.page_pool import PagePool


def test_pages_go_out_lowest_first_and_the_last_freed_comes_back_first() -> None:
    pool = PagePool(4)
    assert [pool.pop() for _ in range(3)] == [0, 1, 2]
    pool.push([0, 2])
    assert pool.num_free == 3
    assert [pool.pop() for _ in range(3)] == [2, 0, 3]


def test_an_empty_pool_gives_nothing_and_a_full_one_takes_nothing() -> None:
    pool = PagePool(1)
    with pytest.raises(ControlPlaneError, match=r"^2 pages are free, the pool has 1$"):
        pool.push([0])
    pool = PagePool(1)
    pool.pop()
    with pytest.raises(ControlPlaneError, match=r"^a page was taken from an empty pool$"):
        pool.pop()


def test_reset_is_the_state_at_start() -> None:
    pool = PagePool(3)
    taken = [pool.pop(), pool.pop()]
    pool.push(taken)
    pool.pop()
    pool.reset()
    assert pool.free_pages() == PagePool(3).free_pages() == [2, 1, 0]
