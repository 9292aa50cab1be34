"""The radix tree: it maps token prefixes to the pages with their KV.

Invariants: edges cover whole pages; no two nodes stand for the same tokens in the same namespace (siblings differ in
the namespace or in their first page), and a match never leaves its namespace; a node's lock count is the number of
handles on it and below it, so an unlocked node has no locked descendant; locked nodes are never trimmed or removed,
though a split may divide one.

Matching is read-only. A caller that will use the match locks it (`descend`), and only that may split an edge, so a
request that is matched and then not admitted has no effect.

Recency is a logical clock: unlocking a path gives each node whose count falls to zero the next tick, deepest first. So
a parent is always younger than its children, and the oldest unlocked node is a leaf. Frequency, for LFU, counts the
handles that came to cover a node. A split copies both to the new upper node.

For models with recurrent layers `checkpoints` is set. A sequence is then matched only up to the deepest checkpoint on
its path; pages below it are useless, so an unlocked leaf without a checkpoint is freed at once, and nodes are evicted
whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.policies import CachePolicy
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix.checkpoints import Checkpoints
from minisgl.scheduler.reference.radix.evict import EvictionHeap
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node, PageKey, page_key


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest cached continuation below a node: whole edges down to `node`, then `num_partial_pages` pages of the
    edge of `partial`, a child of `node`. `num_unlocked` of the `pages` are evictable until the match is locked."""

    node: Node
    partial: Node | None
    num_partial_pages: int
    pages: list[int]
    num_unlocked: int

    @property
    def end(self) -> Node | None:
        """The last node of the match; `None` if the match ends in the middle of an edge."""
        return self.node if self.partial is None else None


class RadixTree:
    """A prefix cache over the pages of `pool`, to which evicted pages return. With the policy "naive" it is empty."""

    def __init__(
        self, pool: PagePool, page_size: int, policy: CachePolicy, checkpoints: Checkpoints | None = None
    ) -> None:
        self.pool = pool
        self.checkpoints = checkpoints
        self.page_size = page_size
        self.policy: CachePolicy = policy
        self.root = Node(None, [], [])
        self.num_evictable = 0  # pages of unlocked nodes
        self.num_protected = 0  # pages of locked nodes
        self.num_nodes = 0  # without the root
        self.clock = 0
        self.num_inserted_total = 0  # pages that entered the tree; below, pages that left it
        self.num_evicted_total = 0
        self.heap = EvictionHeap(by_frequency=policy == "lfu")

    # ------------------------------------------------------------------------------------------------ read only

    def match(self, node: Node, tokens: list[int], first_page: int, max_pages: int, namespace: int = 0) -> Match:
        """Match `tokens` below `node`, which stands for their first `first_page` pages, within `namespace`, and up to
        at most page `max_pages` of `tokens`. O(matched tokens)."""
        size = self.page_size
        pages: list[int] = []
        num_unlocked = 0
        at = first_page
        while at < max_pages:
            child = node.children.get(page_key(namespace, tokens[at * size : (at + 1) * size]))
            if child is None:
                break
            common = self._num_common_pages(child, tokens, at, max_pages)
            at += common
            pages += child.pages[:common]
            if child.lock == 0:
                num_unlocked += common
            if common < len(child.pages):
                return Match(node, child, common, pages, num_unlocked)
            node = child
        return Match(node, None, 0, pages, num_unlocked)

    def beginning(self, node: Node, match: Match, step: int) -> Match:
        """Return the part of `match`, which began at `node`, from whose state a row of `step` can start: up to the
        deepest checkpoint that an earlier step saved, or no pages. `num_unlocked` still counts the whole match."""
        end, num_pages = match.node, len(match.pages) - match.num_partial_pages
        while end is not node and (end.checkpoint == NO_CHECKPOINT or end.saved_in >= step):
            num_pages -= len(end.pages)
            if end.parent is None:
                raise ControlPlaneError("a match does not begin at the given node")
            end = end.parent
        return Match(end, None, 0, match.pages[:num_pages], match.num_unlocked)

    def has_page(self, node: Node, tokens: list[int], column: int, namespace: int = 0) -> bool:
        """Return whether page `column` of `tokens` is cached directly below `node`, which ends before that page."""
        return page_key(namespace, tokens[column * self.page_size : (column + 1) * self.page_size]) in node.children

    def following(self, node: Node, tokens: list[int], first_page: int, count: int, namespace: int) -> list[int]:
        """Return up to `count` cached tokens that follow `tokens` within one edge of `namespace`. `node` stands for
        their first `first_page` pages. Empty if `tokens` cover no whole page of that edge, by which it is found."""
        size, at = self.page_size, first_page
        while (at + 1) * size <= len(tokens):
            child = node.children.get(page_key(namespace, tokens[at * size : (at + 1) * size]))
            if child is None:
                return []
            rest = tokens[at * size : at * size + len(child.tokens)]
            if child.tokens[: len(rest)] != rest:
                return []
            if len(rest) < len(child.tokens):
                return child.tokens[len(rest) : len(rest) + count]
            at, node = at + len(child.pages), child
        return []

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes but the root, parents before their children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]:
        """Return each cached page with all tokens from the root to its end, preceded by -namespace if that is not 0.
        For tests: quadratic in the depth."""
        pages: list[tuple[tuple[int, ...], int]] = []
        stack: list[tuple[Node, tuple[int, ...]]] = [(self.root, ())]
        while stack:
            node, path = stack.pop()
            if node.parent is self.root and node.namespace:
                path = (-node.namespace,)
            for i, page in enumerate(node.pages):
                pages.append((path + tuple(node.tokens[: (i + 1) * self.page_size]), page))
            below = path + tuple(node.tokens)
            stack.extend((child, below) for child in node.children.values())
        return pages

    def tree_states(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the slot of each checkpoint with its path, in the format of `tree_pages`. For tests."""
        ends = {node.pages[-1]: node.checkpoint for node in self.nodes() if node.checkpoint != NO_CHECKPOINT}
        return [(path, ends[page]) for path, page in self.tree_pages() if page in ends]

    # ---------------------------------------------------------------------------------------------------- locks

    def descend(self, handle: Node, match: Match) -> Node:
        """Move a handle from `handle` down to the end of `match`, which began there, and lock the path. An edge in
        which the match ends is split. Returns the new handle."""
        target = match.node if match.partial is None else self._split(match.partial, match.num_partial_pages)
        self._lock(handle, target)
        return target

    def release(self, handle: Node) -> None:
        """Release a handle: decrement the lock count of every node from it up to the root."""
        node = handle
        while node.parent is not None:
            node.lock -= 1
            if node.lock == 0:
                self.clock += 1
                node.stamp = self.clock
                self.num_evictable += len(node.pages)
                self.num_protected -= len(node.pages)
                if not node.children:
                    self.heap.add(node)
            elif node.lock < 0:
                raise ControlPlaneError("a node of the radix tree was unlocked more often than locked")
            node = node.parent
        self._prune(handle)
        self.heap.sweep(self.num_nodes, (n for n in self.nodes() if n.is_evictable_leaf))

    # ---------------------------------------------------------------------------------------- growing, shrinking

    def append(self, handle: Node, tokens: list[int], pages: list[int], namespace: int = 0) -> Node:
        """Add `pages`, the KV of `tokens`, as a new child of `handle` and move the handle onto it. The tree must not
        have the first page yet (`has_page`). Returns the new handle."""
        if not pages or len(tokens) != len(pages) * self.page_size:
            raise ControlPlaneError(f"{len(tokens)} tokens do not fill {len(pages)} pages")
        key = page_key(namespace, tokens[: self.page_size])
        if key in handle.children:
            raise ControlPlaneError("the radix tree holds these tokens already")
        child = Node(handle, tokens, pages, namespace=namespace)
        handle.children[key] = child
        self.num_nodes += 1
        self.num_evictable += len(pages)
        self.num_inserted_total += len(pages)
        self._lock(handle, child)
        return child

    def insert(
        self, handle: Node, tokens: list[int], pages: list[int], first_page: int, namespace: int = 0
    ) -> tuple[Node, int]:
        """Move a handle that covers `first_page` pages to the end of `tokens` (whole pages): first over pages that the
        tree has, then by adding the rest of `pages` (one page id per page of `tokens`). Returns the new handle and the
        number of pages that the tree had: the caller keeps its own copies of those."""
        num_pages = len(pages)
        match = self.match(handle, tokens, first_page, num_pages, namespace)
        handle = self.descend(handle, match)
        had = first_page + len(match.pages)
        if had < num_pages:
            size = self.page_size
            handle = self.append(handle, tokens[had * size : num_pages * size], pages[had:num_pages], namespace)
        return handle, had

    @property
    def num_available(self) -> int:
        """Pages that `take` can allocate: free and evictable ones."""
        return self.pool.num_free + self.num_evictable

    def take(self, num_pages: int) -> list[int]:
        """Allocate pages. If the pool has too few, the others are evicted to the pool first."""
        pool = self.pool
        if pool.num_free < num_pages:
            self.evict(num_pages - pool.num_free)
        return [pool.pop() for _ in range(num_pages)]

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` pages: trim the oldest unlocked leaf from its end, page by page, then the next. With
        recurrent layers nodes are evicted whole."""
        target = self.pool.num_free + num_pages
        while self.pool.num_free < target:
            leaf = self.heap.peek()
            if leaf is None or leaf.parent is None:
                raise ControlPlaneError("more pages were evicted than the radix tree can give")
            parent, count = leaf.parent, len(leaf.pages)
            self._trim(leaf, count if self.checkpoints is not None else min(target - self.pool.num_free, count))
            self._prune(parent)

    def drop(self, node: Node, depth: int, keep: int) -> None:
        """Free the end of the path to `node`, which is `depth` pages long, except its first `keep` pages. Stops at a
        page that a handle or other sequences below it use."""
        while depth > keep and node.is_evictable_leaf:
            count, parent = min(depth - keep, len(node.pages)), node.parent
            if parent is None:
                raise ControlPlaneError("a removed node was dropped")
            self._trim(node, count)
            self._prune(node if node.pages else parent)
            depth, node = depth - count, parent

    def reset(self) -> None:
        """Empty the tree: all pages and slots are free, in the order of a new object. The clock continues."""
        self.pool.reset()
        self.num_evicted_total += self.num_evictable + self.num_protected
        self.root = Node(None, [], [])
        self.num_evictable = self.num_protected = self.num_nodes = 0
        self.heap.clear()
        if self.checkpoints is not None:
            self.checkpoints.reset()

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save(self, match: Match, step: int) -> int | None:
        """Allocate the slot in which `step` saves the state at the end of `match`; an edge is split there. `None` if a
        state is saved there already, or no slot is available."""
        if self.checkpoints is None:
            return None
        node = match.node if match.partial is None else self._split(match.partial, match.num_partial_pages)
        slot = self.take_slot() if node.checkpoint == NO_CHECKPOINT else None
        if slot is not None:
            self.checkpoints.put(node, slot, step)
        return slot

    def take_slot(self) -> int | None:
        """Allocate a checkpoint slot: a free one, else that of the least worth. `None` if there is neither."""
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        slot = checkpoints.pop()
        if slot is None and (node := checkpoints.least()) is not None:
            slot = checkpoints.give_up(node)
            self._prune(node)
        return slot

    # -------------------------------------------------------------------------------------------------- helpers

    def _key(self, node: Node) -> PageKey:
        return page_key(node.namespace, node.tokens[: self.page_size])

    def _num_common_pages(self, child: Node, tokens: list[int], at: int, max_pages: int) -> int:
        """Return how many pages of `child` equal those of `tokens` from page `at` on; the first must be equal."""
        size = self.page_size
        count = min(len(child.pages), max_pages - at)
        start = at * size
        if child.tokens[: count * size] == tokens[start : start + count * size]:
            return count
        common = 1
        while (
            child.tokens[common * size : (common + 1) * size]
            == tokens[start + common * size : start + (common + 1) * size]
        ):
            common += 1
        return common

    def _split(self, node: Node, num_pages: int) -> Node:
        """Split an edge after `num_pages` pages and return the new upper node. `node` stays the lower one, so that
        handles on it keep their depth."""
        parent = node.parent
        if parent is None:
            raise ControlPlaneError("a removed node was split")
        cut = num_pages * self.page_size
        upper = Node(parent, node.tokens[:cut], node.pages[:num_pages], namespace=node.namespace)
        upper.lock, upper.stamp, upper.frequency = node.lock, node.stamp, node.frequency
        parent.children[self._key(upper)] = upper
        del node.tokens[:cut], node.pages[:num_pages]
        upper.children[self._key(node)] = node
        node.parent = upper
        self.num_nodes += 1
        return upper

    def _lock(self, handle: Node, target: Node) -> None:
        """Lock the nodes from `target` up to `handle`, which is left out."""
        node = target
        while node is not handle:
            if node.lock == 0:
                self.num_evictable -= len(node.pages)
                self.num_protected += len(node.pages)
            node.lock += 1
            node.frequency += 1
            if node.parent is None:
                raise ControlPlaneError("a handle was moved to a node that is not below it")
            node = node.parent

    def _trim(self, leaf: Node, count: int) -> None:
        """Free the last `count` pages of an unlocked leaf, last page first, and the checkpoint at its end."""
        if self.checkpoints is not None and leaf.checkpoint != NO_CHECKPOINT:
            self.checkpoints.push(self.checkpoints.take_off(leaf))
        num_left = len(leaf.pages) - count
        self.pool.push(reversed(leaf.pages[num_left:]))
        self.num_evictable -= count
        self.num_evicted_total += count
        if num_left == 0:
            self._remove(leaf)
        else:
            del leaf.pages[num_left:], leaf.tokens[num_left * self.page_size :]

    def _prune(self, node: Node) -> None:
        """Free `node` and its ancestors while they are unlocked leaves without a checkpoint. Does nothing without
        recurrent layers."""
        while self.checkpoints is not None and node.is_evictable_leaf and node.checkpoint == NO_CHECKPOINT:
            parent = node.parent
            self._trim(node, len(node.pages))
            if parent is None:
                return
            node = parent

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise ControlPlaneError("a removed node was evicted")
        del parent.children[self._key(leaf)]
        leaf.parent = None
        leaf.pages.clear()
        self.num_nodes -= 1
        if parent.is_evictable_leaf:
            self.heap.add(parent)
