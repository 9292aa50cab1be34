"""Single operations of the prefix cache: an eviction, a match, an insertion.

Keeps true: both implementations work on the same trees, of `NUM_NODES` nodes at each timed operation; what prepares one
is off the clock. Rust is timed in Rust (`minisgl._rust.measure`), the reference from Python.
Doesn't know: requests, steps.

A match counts as a use, so it includes a lock and its release on the way down.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix import RadixTree

NUM_NODES = 100_000
LENGTH = 1024
NUM_PROMPTS = 64
NUM_EDGES = 8  # of a prompt that is matched


class Cache:
    """The reference's tree of page size 1, with tokens and pages that nobody has."""

    def __init__(self, num_pages: int) -> None:
        self.tree = RadixTree(PagePool(num_pages), 1, "lru")
        self.next_token = 0
        self.times_us: list[float] = []

    def insert(self, shared: list[int], length: int) -> list[int]:
        """Insert `shared` and so many new tokens; returns all."""
        tokens = shared + list(range(self.next_token, self.next_token + length))
        self.next_token += length
        pages = [self.tree.pool.pop() for _ in tokens]
        self._insert(tokens, pages)
        return tokens

    def _insert(self, tokens: list[int], pages: list[int]) -> None:
        handle, had = self.tree.insert(self.tree.root, tokens, pages, 0)
        self.tree.pool.push(pages[:had])
        self.tree.release(handle)

    def timed(self, work: Callable[[], None]) -> None:
        start = time.perf_counter_ns()
        work()
        self.times_us.append((time.perf_counter_ns() - start) / 1000)


def evict_one(repeats: int) -> list[float]:
    cache = Cache(NUM_NODES)
    for _ in range(NUM_NODES):
        cache.insert([], 1)
    for _ in range(repeats):
        cache.timed(lambda: cache.tree.evict(1))
        cache.insert([], 1)
    return cache.times_us


def match_1024(repeats: int) -> list[float]:
    cache = Cache(2 * NUM_NODES)
    tree = cache.tree
    prompts = []
    for _ in range(NUM_PROMPTS):
        prompt = cache.insert([], LENGTH)
        for edge in range(1, NUM_EDGES):
            cache.insert(prompt[: edge * LENGTH // NUM_EDGES], 1)
        prompts.append(prompt)
    while tree.num_nodes < NUM_NODES:
        cache.insert([], 1)

    def match(prompt: list[int]) -> None:
        found = tree.match(tree.root, prompt, 0, LENGTH)
        tree.release(tree.descend(tree.root, found))
        assert len(found.pages) == LENGTH

    for at in range(repeats):
        prompt = prompts[at * 37 % NUM_PROMPTS]
        cache.timed(lambda prompt=prompt: match(prompt))  # type: ignore[misc]
    return cache.times_us


def insert_1024(repeats: int) -> list[float]:
    cache = Cache(NUM_NODES + repeats * LENGTH)
    for _ in range(repeats):
        cache.insert([], LENGTH)
    while cache.tree.num_nodes < NUM_NODES:
        cache.insert([], 1)
    for _ in range(repeats):
        cache.tree.evict(LENGTH)
        tokens = list(range(cache.next_token, cache.next_token + LENGTH))
        cache.next_token += LENGTH
        pages = [cache.tree.pool.pop() for _ in tokens]
        cache.timed(lambda tokens=tokens, pages=pages: cache._insert(tokens, pages))  # type: ignore[misc]
    return cache.times_us


REFERENCE = {"evict_one": evict_one, "match_1024": match_1024, "insert_1024": insert_1024}
REPEATS = {
    "evict_one": {"rust_hotpath": 20_000, "python": 2000},
    "match_1024": {"rust_hotpath": 5000, "python": 200},
    "insert_1024": {"rust_hotpath": 1000, "python": 100},
}
BARS = {"evict_one": 0.6, "match_1024": 1.5, "insert_1024": 1.5}


def times(backend: str, name: str, repeats: int) -> list[float]:
    """Of each operation, in us."""
    if backend == "python":
        return REFERENCE[name](repeats)
    from minisgl import _rust

    return _rust.measure(name, repeats)


def bars(name: str) -> dict[str, float]:
    """The bars in us: what a release must hold."""
    return {"rust_hotpath": BARS[name]}
