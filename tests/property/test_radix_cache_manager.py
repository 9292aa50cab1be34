"""`minisgl._rust.RadixCacheManager` under random operations: the pages that the reference's tree has, in its order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from minisgl._rust import RadixCacheHandle, RadixCacheManager
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix import RadixTree


@dataclass
class Both:
    """A manager and the reference's tree, which work on the same pages."""

    size: int
    policy: Literal["lru", "lfu"]
    num_pages: int = 60
    unused: list[int] = field(default_factory=list)
    locked: list[tuple[RadixCacheHandle, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = RadixCacheManager(self.num_pages, self.size, self.policy)
        self.pool = PagePool(self.num_pages)
        self.tree = RadixTree(self.pool, self.size, self.policy)
        self.unused = [self.pool.pop() for _ in range(self.num_pages)]

    def match(self, tokens: list[int], keep: bool) -> None:
        handle, pages = self.cache.match_prefix(np.array(tokens, np.int32))
        found = self.tree.match(self.tree.root, tokens, 0, len(tokens) // self.size)
        node = self.tree.descend(self.tree.root, found)
        self.tree.release(node)
        assert pages.tolist() == found.pages and handle.cached_len == len(found.pages) * self.size
        if keep:
            self.cache.lock_handle(handle)
            self.tree.descend(self.tree.root, self.tree.match(self.tree.root, tokens, 0, len(found.pages)))
            self.locked.append((handle, node))

    def unlock(self, which: int) -> None:
        handle, node = self.locked.pop(which)
        self.cache.lock_handle(handle, unlock=True)
        self.tree.release(node)

    def insert(self, tokens: list[int]) -> None:
        count = len(tokens) // self.size
        if count > len(self.unused):
            return
        pages = [self.unused.pop() for _ in range(count)]
        had = self.cache.insert_prefix(np.array(tokens[: count * self.size], np.int32), np.array(pages, np.int32))
        node, expected = self.tree.insert(self.tree.root, tokens[: count * self.size], pages, 0)
        self.tree.release(node)
        assert had == expected
        self.unused += pages[:had]

    def evict(self, count: int) -> None:
        count = min(count, self.tree.num_evictable)
        pages = self.cache.evict(count).tolist()
        expected = []
        for _ in range(count):
            self.tree.evict(1)
            expected.append(self.pool.pop())
        assert pages == expected
        self.unused += pages

    def check(self) -> None:
        self.cache.check_integrity()
        assert self.cache.size_info() == (self.tree.num_evictable, self.tree.num_protected)
        assert sorted(self.cache.tree_pages()) == sorted(self.tree.tree_pages())


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int, size: int, policy: Literal["lru", "lfu"]) -> None:
    draw = random.Random(f"{seed} {size} {policy}")
    both = Both(size, policy)
    for _ in range(150):
        # few distinct tokens, in runs, so that prefixes are shared and edges are split
        tokens = [token for _ in range(draw.randint(1, 8)) for token in [draw.randint(1, 2)] * draw.randint(1, size)]
        kind = draw.randint(0, 9)
        if kind <= 4:
            both.insert(tokens)
        elif kind <= 6:
            both.match(tokens, keep=draw.random() < 0.5)
        elif kind == 7 and both.locked:
            both.unlock(draw.randrange(len(both.locked)))
        else:
            both.evict(draw.randint(0, 6))
        both.check()
    while both.locked:
        both.unlock(0)
    both.evict(both.num_pages)
    both.check()
    assert sorted(both.unused) == list(range(both.num_pages))
