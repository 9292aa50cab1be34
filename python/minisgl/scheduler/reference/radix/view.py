"""View of the radix tree for monitoring: its largest nodes.

Invariants: reads only; the view equals that of the Rust implementation for an equal tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from minisgl.scheduler.api import TreeNode, TreeView
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node
from minisgl.scheduler.reference.radix.tree import RadixTree

SHOWN_TOKENS = 16  # tokens shown of an edge


def view(tree: RadixTree, limit: int, pinned: Collection[int]) -> TreeView:
    """Return the size of the tree and its `limit` largest nodes. `pinned`: the `id` of each node that a pin holds."""
    nodes = heapq.nsmallest(limit, tree.nodes(), key=lambda node: (-len(node.pages), _number(node)))
    num_tokens = (tree.num_evictable + tree.num_protected) * tree.page_size
    return tree.num_nodes, num_tokens, [_shown(node, tree.clock, id(node) in pinned) for node in nodes]


def _number(node: Node | None) -> int:
    """Return a node's id for the view, equal in every implementation: its first page + 1, or 0 for the root."""
    return 0 if node is None or not node.pages else node.pages[0] + 1


def _shown(node: Node, clock: int, is_pinned: bool) -> TreeNode:
    depth, at = 0, node
    while at.parent is not None:
        depth, at = depth + len(at.tokens), at.parent
    age = 0 if node.lock else clock - node.stamp
    begins = node.tokens[:SHOWN_TOKENS]
    numbers = _number(node), _number(node.parent), len(node.tokens), depth, node.lock, age, len(node.children)
    return (*numbers, is_pinned, node.checkpoint != NO_CHECKPOINT, begins)
