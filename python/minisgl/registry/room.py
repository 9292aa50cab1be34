"""Decides whose room a model gets, and when: rules over facts and times that are given, without processes and clocks.

Invariants: a model that serves, is being loaded or unloaded, or is pinned, loses nothing; of the others the least
recently used goes first, and no more go than must.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PATIENCE_S = 1.0  # at least: else as long as it took to load the model that is to go
FIRST_WAIT_S = 1.0  # after a load that failed; then twice as long each time
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model that takes room. `used`: its last request's place among all."""

    name: str
    need: int
    used: int
    pinned: bool = False
    busy: bool = False  # it serves, or is being loaded or unloaded


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of all models. `set_aside`: bytes of the tenants, and of models that are being unloaded."""

    budget: int
    set_aside: int
    tenants: Sequence[Tenant]


@dataclass(frozen=True, slots=True)
class Move:
    """The next move for a model that wants room. `load`: it fits now. `unload`: idle models that go at once.
    `leave`: busy models that take no more requests. `again_s`: the seconds until time alone changes the decision."""

    load: bool = False
    unload: Sequence[str] = ()
    leave: Sequence[str] = ()
    again_s: float = math.inf


def make_room(room: Room, need: int) -> Move | None:
    """Return how `need` bytes become free out of what is idle; `None` if the models in their place are busy."""
    going = victims(room.budget, room.tenants, need)
    return None if going is None else Move(not going and room.set_aside + need <= room.budget, going)


def move(room: Room, need: int, waited_s: float, load_s: Mapping[str, float]) -> Move:
    """Return what is to be done for the model that has waited longest, for `waited_s` seconds. Busy models give way to
    it once it has waited as long as the slowest of them takes to load, by `load_s`."""
    if (found := make_room(room, need)) is not None:
        return found
    wanted = victims(room.budget, room.tenants, need, even_busy=True) or []
    left_s = max(PATIENCE_S, *(load_s[name] for name in wanted), 0.0) - waited_s
    return Move(again_s=left_s) if left_s > 0 else Move(leave=wanted)


def victims(budget: int, tenants: Iterable[Tenant], need: int, *, even_busy: bool = False) -> list[str] | None:
    """Return the models that must go so that `need` bytes fit; `None` if they do not fit now. `even_busy`: models that
    serve may go too, as if their requests had ended."""
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
    for one in reversed(going[:-1]):  # the last one alone may have made room enough
        if free - one.need >= need:
            going.remove(one)
            free -= one.need
    return [one.name for one in going]


def never_fits(budget: int, tenants: Iterable[Tenant], need: int) -> bool:
    """Return whether a model would not fit beside those that are pinned, even if no other were there."""
    return need > budget - sum(one.need for one in tenants if one.pinned)


def retry_after_s(num_failures: int) -> float:
    """Return how many seconds a model is not tried again after so many failures in succession."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (num_failures - 1))
