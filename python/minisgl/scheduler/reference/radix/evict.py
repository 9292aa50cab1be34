"""Eviction order of the radix tree's leaves: a heap of unlocked leaves with lazy deletion.

Invariants: every unlocked leaf has a live entry; at most half of the entries (and a few) are dead, so that finding the
next leaf is O(log n) amortized.

An entry is live as long as its node is an unlocked leaf with the entry's stamp. A lock, a child or a removal makes it
dead without a search; the heap drops it when it reaches the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from minisgl.scheduler.reference.radix.nodes import Node

_SLACK = 64

Entry = tuple[int, int, int, Node]  # frequency (0 under LRU), stamp, tie-break among dead entries, node


class EvictionHeap:
    """Heap of leaves by stamp (LRU), or by frequency and then stamp (LFU).

    Two unlocked leaves never share a stamp: a stamp is given to one node, and only a split copies it, to a parent of
    that node.
    """

    __slots__ = ("_by_frequency", "_count", "_heap")

    def __init__(self, by_frequency: bool) -> None:
        self._by_frequency = by_frequency
        self._heap: list[Entry] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def clear(self) -> None:
        self._heap.clear()

    def add(self, leaf: Node) -> None:
        """Add `leaf`, which has just become an unlocked leaf."""
        heapq.heappush(self._heap, self._entry(leaf))

    def peek(self) -> Node | None:
        """Return the leaf that is evicted next; `None` if every leaf is locked."""
        while self._heap:
            if _is_live(self._heap[0]):
                return self._heap[0][3]
            heapq.heappop(self._heap)
        return None

    def sweep(self, num_nodes: int, leaves: Iterable[Node]) -> None:
        """Rebuild the heap from `leaves` (all unlocked ones) if it has many more entries than the tree has nodes."""
        if len(self._heap) > 2 * num_nodes + _SLACK:
            self._heap = [self._entry(leaf) for leaf in leaves]
            heapq.heapify(self._heap)

    def live_nodes(self) -> list[Node]:
        """Return the nodes with a live entry, in no order."""
        return [entry[3] for entry in self._heap if _is_live(entry)]

    def _entry(self, leaf: Node) -> Entry:
        self._count += 1
        return (leaf.frequency if self._by_frequency else 0, leaf.stamp, self._count, leaf)


def _is_live(entry: Entry) -> bool:
    node = entry[3]
    return node.is_evictable_leaf and node.stamp == entry[1]
