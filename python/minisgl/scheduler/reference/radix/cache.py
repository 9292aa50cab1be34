"""The radix tree with the interface that the scheduler uses: `scheduler.parts.PrefixTree`."""

from __future__ import annotations

from collections.abc import Collection

from minisgl.scheduler.api import ControlPlaneError, TreeView
from minisgl.scheduler.policies import CachePolicy
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix.check import check_tree
from minisgl.scheduler.reference.radix.checkpoints import Checkpoints
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node
from minisgl.scheduler.reference.radix.tree import RadixTree
from minisgl.scheduler.reference.radix.view import view


class RadixCache(RadixTree):
    """A radix tree with a pool of `num_pages` pages, and `num_checkpoints` state slots for models with recurrent layers
    (`None`: the model has none)."""

    def __init__(self, num_pages: int, page_size: int, policy: CachePolicy, num_checkpoints: int | None = None) -> None:
        checkpoints = None if num_checkpoints is None else Checkpoints(num_checkpoints)
        super().__init__(PagePool(num_pages), page_size, policy, checkpoints)

    @property
    def num_free(self) -> int:
        """Free pages of the pool."""
        return self.pool.num_free

    def free(self, pages: list[int]) -> None:
        """Return `pages` to the pool, in order: the last of them is allocated first."""
        self.pool.push(pages)

    def free_pages(self) -> list[int]:
        """Return the pool's stack of free pages; the next to be allocated is last."""
        return self.pool.free_pages()

    @property
    def has_states(self) -> bool:
        """True for a model with recurrent layers, whose states the tree keeps."""
        return self.checkpoints is not None

    @property
    def num_checkpoints(self) -> int:
        """Checkpoint slots that nodes or requests own."""
        return self.checkpoints.num_used if self.checkpoints is not None else 0

    def free_slots(self) -> list[int]:
        return self.checkpoints.free_slots() if self.checkpoints is not None else []

    def held_slots(self) -> list[int]:
        """Return the checkpoint slots that pins keep from eviction, ascending."""
        return sorted(self.checkpoints.known()[1]) if self.checkpoints is not None else []

    def free_slot(self, slot: int) -> None:
        """Free a checkpoint slot that no node owns."""
        if self.checkpoints is not None:
            self.checkpoints.push(slot)

    def checkpoint(self, node: Node) -> int:
        """Return the slot of the state at the end of `node`, or `NO_CHECKPOINT`."""
        return node.checkpoint

    def put_checkpoint(self, node: Node, slot: int, step: int) -> None:
        """Give checkpoint `slot`, saved by `step`, to `node`: see `Checkpoints.put`."""
        if self.checkpoints is None:
            raise ControlPlaneError("a state was saved of a model that has none")
        self.checkpoints.put(node, slot, step)

    def use_checkpoint(self, node: Node) -> None:
        """Renew the worth of the checkpoint of `node`: see `Checkpoints.use`."""
        if self.checkpoints is not None:
            self.checkpoints.use(node)

    def settle_checkpoints(self) -> None:
        """Let new checkpoints be evicted from now on: see `Checkpoints.settle`."""
        if self.checkpoints is not None:
            self.checkpoints.settle()

    def hold_deepest(self, handle: Node) -> Node | None:
        """Keep the deepest checkpoint on the path to `handle` from eviction. Returns its node; `None` if none."""
        node: Node | None = handle
        while node is not None and node.checkpoint == NO_CHECKPOINT:
            node = node.parent
        if node is not None and self.checkpoints is not None:
            self.checkpoints.hold(node)
        return node

    def unhold(self, node: Node) -> None:
        """Undo one `hold_deepest` that returned `node`."""
        if self.checkpoints is not None:
            self.checkpoints.unhold(node)

    # --------------------------------------------------------------------------------------------------- for checks

    def check_integrity(self) -> None:
        """Check the tree's structure: see `check_tree`."""
        check_tree(self)

    def shape(self) -> list[tuple[int, int, int, list[int], int]]:
        """Return for each node but the root its key, its parent's key, its lock count, its pages and its checkpoint."""
        return [(id(node), id(node.parent), node.lock, node.pages, node.checkpoint) for node in self.nodes()]

    def path(self, node: Node) -> tuple[list[int], list[int]]:
        """Return all tokens and pages from the root to the end of `node`."""
        tokens: list[int] = []
        pages: list[int] = []
        at: Node | None = node
        while at is not None:
            tokens[:0], pages[:0] = at.tokens, at.pages
            at = at.parent
        return tokens, pages

    def path_nodes(self, node: Node) -> list[tuple[int, int]]:
        """Return the key and the page count of each node from `node` up to the root, which is left out."""
        nodes = []
        while node.parent is not None:
            nodes.append((id(node), len(node.pages)))
            node = node.parent
        return nodes

    def view(self, limit: int, pinned: Collection[int]) -> TreeView:
        """Return the `limit` largest nodes for monitoring: see `radix.view.view`."""
        return view(self, limit, pinned)
