"""Checkpoints: slots for the state that state layers have after the tokens from the root of the tree to a node's end.

Invariants: a slot is free, a node's, or the tail of one started request; a checkpoint that is saved in a step is found
from the next step on, and its slot is not given out again before.

A checkpoint is worth the tokens that it saves, which are those since the checkpoint above it, and loses its worth with
age by the rule of GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997): when it is saved or
used, its worth is its tokens above that of the one that was given up last; the one of least worth goes next, of equal
ones the one that was used first.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node

Worth = tuple[int, int, int]  # its worth, the count of uses by which ties are broken, the slot


class Checkpoints:
    """Slots 0 .. num_slots - 1. The free ones are a stack, at start with the lowest on top."""

    __slots__ = ("_free", "_held", "_new", "_order", "_uses", "_worth", "floor", "nodes", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.floor = 0  # the worth of the one that was given up last
        self._uses = 0
        self.reset()

    def reset(self) -> None:
        """All slots are free, stacked as at start."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self.nodes: dict[int, Node] = {}  # by slot
        self._order: list[Worth] = []  # of those that may be given up
        self._worth: dict[int, Worth] = {}
        self._held: dict[int, int] = {}  # by how many pins
        self._new: list[int] = []  # in this step

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def free_slots(self) -> list[int]:
        return list(self._free)

    def known(self) -> tuple[set[int], set[int]]:
        """For checks: the slots of nodes that may be given up, and those that pins hold."""
        return {slot for _, _, slot in self._order}, set(self._held)

    def pop(self) -> int | None:
        """A free slot."""
        return self._free.pop() if self._free else None

    def push(self, slot: int) -> None:
        self._free.append(slot)
        if len(self._free) > self.num_slots:
            raise ControlPlaneError(f"{len(self._free)} slots of checkpoints are free, there are {self.num_slots}")

    def least(self) -> Node | None:
        """The node whose checkpoint goes next. None if there is none that may go."""
        return self.nodes[self._order[0][2]] if self._order else None

    def give_up(self, node: Node) -> int:
        """Take the checkpoint of `least` off its node; its slot, which is not free yet."""
        self.floor = self._order[0][0]
        return self.take_off(node)

    def put(self, node: Node, slot: int, step: int) -> None:
        """`slot` holds, or will hold after `step`, the state at the end of `node`."""
        if node.checkpoint != NO_CHECKPOINT or node.parent is None:
            raise ControlPlaneError("a checkpoint was given to a node that has one, or is gone")
        node.checkpoint, node.saved_in = slot, step
        self.nodes[slot] = node
        self._new.append(slot)

    def take_off(self, node: Node) -> int:
        """The node has no checkpoint any more; the slot that it had, which is not free yet."""
        slot = node.checkpoint
        self._unlist(slot)
        del self.nodes[slot]
        if slot in self._new:
            self._new.remove(slot)
        node.checkpoint = NO_CHECKPOINT
        return slot

    def use(self, node: Node) -> None:
        """Somebody begins with it: it is worth its tokens again."""
        slot = node.checkpoint
        if slot in self._worth:
            self._unlist(slot)
            self._enlist(slot)

    def settle(self) -> None:
        """The step is decided: what it saves may be given up from now on."""
        new, self._new = self._new, []
        for slot in new:
            if slot not in self._held:
                self._enlist(slot)

    def hold(self, node: Node) -> None:
        """A pin keeps it."""
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
    """From the end of the next node above that has one, or from the root, to the end of `node`."""
    count, at = len(node.tokens), node.parent
    while at is not None and at.checkpoint == NO_CHECKPOINT:
        count += len(at.tokens)
        at = at.parent
    return count
