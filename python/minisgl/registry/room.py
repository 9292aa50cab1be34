"""The rules of memory: which models must go for another one, and when. They use given facts, no processes and clocks.

Invariants: a model that serves, is being loaded or unloaded, or is pinned, is not unloaded; of the others the least
recently used goes first, and no more go than must.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PATIENCE_S = 1.0  # seconds at least, or as long as the leaving model took to load
FIRST_WAIT_S = 1.0  # seconds after a failed load; doubles each time
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model that takes memory. `used` orders models by their last request."""

    name: str
    need: int
    used: int
    pinned: bool = False
    busy: bool = False  # it serves, or is being loaded or unloaded


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of all models in bytes. `set_aside` is reserved by tenants and by models that are being unloaded."""

    budget: int
    set_aside: int
    tenants: Sequence[Tenant]


@dataclass(frozen=True, slots=True)
class Move:
    """The next step for a model that needs memory. `load`: it fits now. `unload`: idle models to unload at once.
    `leave`: busy models that take no more requests. `again_s`: seconds until time alone changes the decision."""

    load: bool = False
    unload: Sequence[str] = ()
    leave: Sequence[str] = ()
    again_s: float = math.inf


def make_room(room: Room, need: int) -> Move | None:
    """Return how to free `need` bytes from idle models, or None if that would take busy models."""
    going = victims(room.budget, room.tenants, need)
    return None if going is None else Move(not going and room.set_aside + need <= room.budget, going)


def move(room: Room, need: int, waited_s: float, load_s: Mapping[str, float]) -> Move:
    """Return the next step for the model that has waited longest, for `waited_s` seconds. Busy models give way to it
    once it has waited as long as the slowest of them takes to load, by `load_s`."""
    if (step := make_room(room, need)) is not None:
        return step
    wanted = victims(room.budget, room.tenants, need, even_busy=True) or []
    left_s = max(PATIENCE_S, *(load_s[name] for name in wanted), 0.0) - waited_s
    return Move(again_s=left_s) if left_s > 0 else Move(leave=wanted)


def victims(budget: int, tenants: Iterable[Tenant], need: int, *, even_busy: bool = False) -> list[str] | None:
    """Return the models to unload so that `need` bytes fit, or None if they do not fit now. With `even_busy`, serving
    models may go too, as if their requests had ended."""
    there = list(tenants)
    free = budget - sum(one.need for one in there)
    going = list[Tenant]()
    movable = [one for one in there if not one.pinned and (even_busy or not one.busy)]
    for one in sorted(movable, key=lambda one: (one.busy, one.used)):
        if free >= need:
            break
        going.append(one)
        free += one.need
    if free < need:
        return None
    for one in reversed(going[:-1]):  # the last one alone may have freed enough
        if free - one.need >= need:
            going.remove(one)
            free -= one.need
    return [one.name for one in going]


def never_fits(budget: int, tenants: Iterable[Tenant], need: int) -> bool:
    """Return True if a model would not fit next to the pinned ones, even with no other model loaded."""
    return need > budget - sum(one.need for one in tenants if one.pinned)


def retry_after_s(num_failures: int) -> float:
    """Return the seconds until a model is tried again after `num_failures` failures in succession."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (num_failures - 1))
