"""Checkpoints: slots with the recurrent layers' state after the tokens from the root of the tree to the end of a node.

Invariants: a slot is free, a node's, or the tail of one started request; a checkpoint that is saved in a step can be
matched from the next step on, and its slot is not given away before.

The worth of a checkpoint is the number of tokens that it saves, those since the checkpoint above it. It ages by the
rule of GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997): when a checkpoint is saved or
used, its worth is set to its tokens plus the worth of the last evicted one; the one with the least worth is evicted
next, and among equals the least recently used.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node

Worth = tuple[int, int, int]  # worth, tie-breaker (counter of uses), slot


class Checkpoints:
    """Allocator and eviction order of the checkpoint slots 0 .. num_slots - 1. The free ones are a stack, at start with
    the lowest on top."""

    __slots__ = ("_free", "_held", "_new", "_order", "_uses", "_worth", "floor", "nodes", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.floor = 0  # worth of the last evicted checkpoint
        self._uses = 0
        self.reset()

    def reset(self) -> None:
        """Free all slots, in the order of a new object."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self.nodes: dict[int, Node] = {}  # by slot
        self._order: list[Worth] = []  # slots that may be evicted, least worth first
        self._worth: dict[int, Worth] = {}
        self._held: dict[int, int] = {}  # number of pins by slot
        self._new: list[int] = []  # slots saved in this step

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def free_slots(self) -> list[int]:
        return list(self._free)

    def known(self) -> tuple[set[int], set[int]]:
        """Return the slots that may be evicted and the slots that pins hold, for invariant checks."""
        return {slot for _, _, slot in self._order}, set(self._held)

    def pop(self) -> int | None:
        """Allocate a free slot; `None` if there is none."""
        return self._free.pop() if self._free else None

    def push(self, slot: int) -> None:
        self._free.append(slot)
        if len(self._free) > self.num_slots:
            raise ControlPlaneError(f"{len(self._free)} slots of checkpoints are free, there are {self.num_slots}")

    def least(self) -> Node | None:
        """Return the node whose checkpoint is evicted next; `None` if none may be."""
        return self.nodes[self._order[0][2]] if self._order else None

    def give_up(self, node: Node) -> int:
        """Evict the checkpoint of `node`, which `least()` must have returned. Returns its slot, now the caller's."""
        self.floor = self._order[0][0]
        return self.take_off(node)

    def put(self, node: Node, slot: int, step: int) -> None:
        """Record that `slot` holds the state at the end of `node`, once `step` has run. Raises `ControlPlaneError` if
        `node` has a checkpoint or is no longer in the tree."""
        if node.checkpoint != NO_CHECKPOINT or node.parent is None:
            raise ControlPlaneError("a checkpoint was given to a node that has one, or is gone")
        node.checkpoint, node.saved_in = slot, step
        self.nodes[slot] = node
        self._new.append(slot)

    def take_off(self, node: Node) -> int:
        """Remove the checkpoint of `node`. Returns its slot, which the caller owns."""
        slot = node.checkpoint
        self._unlist(slot)
        del self.nodes[slot]
        if slot in self._new:
            self._new.remove(slot)
        node.checkpoint = NO_CHECKPOINT
        return slot

    def use(self, node: Node) -> None:
        """Renew the worth of the checkpoint of `node`, because a request begins with its state."""
        slot = node.checkpoint
        if slot in self._worth:
            self._unlist(slot)
            self._enlist(slot)

    def settle(self) -> None:
        """Let the checkpoints that this step saves be evicted from now on. Called once a step, when it is decided."""
        new, self._new = self._new, []
        for slot in new:
            if slot not in self._held:
                self._enlist(slot)

    def hold(self, node: Node) -> None:
        """Exempt the checkpoint of `node` from eviction for one more pin."""
        slot = node.checkpoint
        self._held[slot] = self._held.get(slot, 0) + 1
        self._unlist(slot)

    def unhold(self, node: Node) -> None:
        slot = node.checkpoint
        self._held[slot] -= 1
        if not self._held[slot]:
            del self._held[slot]
            if slot not in self._new:
                self._enlist(slot)

    def _enlist(self, slot: int) -> None:
        self._uses += 1
        worth = (self.floor + tokens_since_checkpoint(self.nodes[slot]), self._uses, slot)
        self._worth[slot] = worth
        insort(self._order, worth)

    def _unlist(self, slot: int) -> None:
        worth = self._worth.pop(slot, None)
        if worth is not None:
            del self._order[bisect_left(self._order, worth)]


def tokens_since_checkpoint(node: Node) -> int:
    """Return the tokens from the next checkpoint above `node`, or from the root, to its end."""
    count, at = len(node.tokens), node.parent
    while at is not None and at.checkpoint == NO_CHECKPOINT:
        count += len(at.tokens)
        at = at.parent
    return count
