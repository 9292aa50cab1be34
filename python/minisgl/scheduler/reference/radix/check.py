"""Checks the structure of the radix tree from scratch."""

from __future__ import annotations

from minisgl.scheduler.api import need
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node, page_key
from minisgl.scheduler.reference.radix.tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Check links, whole pages, keys and counters, and that every unlocked leaf is in the eviction heap. Raises
    `ControlPlaneError`."""
    evictable = protected = count = 0
    leaves: set[int] = set()
    for node in tree.nodes():
        count += 1
        need(bool(node.pages), "a node of the tree has no pages")
        need(len(node.tokens) == len(node.pages) * tree.page_size, "the tokens of a node don't fill its pages")
        need(node.lock >= 0, "a lock count is negative")
        evictable += 0 if node.lock else len(node.pages)
        protected += len(node.pages) if node.lock else 0
        if node.is_evictable_leaf:
            leaves.add(id(node))
            need(tree.checkpoints is None or node.checkpoint != NO_CHECKPOINT, "a leaf is found by nobody")
        _check_links(node, tree.page_size)
    for key, child in tree.root.children.items():
        own = page_key(child.namespace, child.tokens[: tree.page_size])
        need(child.parent is tree.root and own == key, "a child of the root is lost")
    need(evictable == tree.num_evictable, f"{evictable} pages are evictable, counted {tree.num_evictable}")
    need(protected == tree.num_protected, f"{protected} pages are protected, counted {tree.num_protected}")
    entered = tree.num_inserted_total - tree.num_evicted_total
    need(
        entered == evictable + protected, f"{evictable + protected} pages are in the tree, {entered} entered and stayed"
    )
    need(count == tree.num_nodes, f"the tree has {count} nodes, counted {tree.num_nodes}")
    if tree.checkpoints is not None:
        of_nodes = {node.checkpoint: node for node in tree.nodes() if node.checkpoint != NO_CHECKPOINT}
        need(of_nodes == tree.checkpoints.nodes, "the nodes with checkpoints are others than those that are known")
        listed, pinned = tree.checkpoints.known()
        need(not listed & pinned, "a pinned checkpoint is in the eviction order")
    need(leaves == {id(node) for node in tree.heap.live_nodes()}, "the eviction heap and the unlocked leaves differ")


def _check_links(node: Node, page_size: int) -> None:
    """Check that each child's key is its first page, so that no two siblings begin with the same page."""
    for key, child in node.children.items():
        need(child.parent is node, "a node has a wrong parent link")
        own = page_key(child.namespace, child.tokens[:page_size])
        need(own == key, "a node's key differs from its first page")
        need(child.namespace == node.namespace, "a node is of another namespace than its parent")
        need(child.lock <= node.lock, "a node has more locks than its parent")
