"""Request slots: rows of the engine's request table, which holds sampling parameters and page tables.

Invariants: a slot is free, in use by one started request, or *draining*: its request has left, but a step in flight
still holds a row of it. The plan of the next step names each freed slot once.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlaneError


class SlotTable:
    """Allocator of the request slots 0 .. num_slots - 1. The free ones are a stack, at start with the lowest on top."""

    __slots__ = ("_draining", "_free", "_in_use", "_freed", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._in_use = [False] * num_slots
        self._draining: dict[int, list[int]] = {}  # slots by the last step that holds a row of them
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_draining(self) -> int:
        return sum(map(len, self._draining.values()))

    def assign(self) -> int:
        slot = self._free.pop()
        self._in_use[slot] = True
        return slot

    def free(self, slot: int, last_step: int | None) -> None:
        """Free `slot` at once, or at the commit of `last_step`, the step in flight that holds its last row."""
        if not self._in_use[slot]:
            raise ControlPlaneError(f"slot {slot} was freed, but is not in use")
        self._in_use[slot] = False
        if last_step is None:
            self._put_back(slot)
        else:
            self._draining.setdefault(last_step, []).append(slot)

    def drain(self, step: int) -> None:
        """Free the slots that waited for the commit of `step`, in the order in which they were released."""
        for slot in self._draining.pop(step, ()):
            self._put_back(slot)

    def take_freed(self) -> list[int]:
        """Return the slots that became free since the last call, for the plan."""
        freed, self._freed = self._freed, []
        return freed

    def reset(self) -> None:
        """Free all slots after a failed forward, when nothing is in flight. Those in use or draining are reported as
        freed, ascending, after earlier ones; the stack is as at start."""
        free = set(self._free)
        self._freed += [slot for slot in range(self.num_slots) if slot not in free]
        self._free[:] = range(self.num_slots - 1, -1, -1)
        self._in_use = [False] * self.num_slots
        self._draining.clear()

    def owners(self) -> tuple[list[int], list[int], list[int]]:
        """Return the free slots in stack order, those in use, and the draining ones, ascending. For checks."""
        in_use = [slot for slot, used in enumerate(self._in_use) if used]
        return list(self._free), in_use, sorted(slot for slots in self._draining.values() for slot in slots)

    def _put_back(self, slot: int) -> None:
        self._free.append(slot)
        self._freed.append(slot)
