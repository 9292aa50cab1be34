"""Whose room a model gets: the rule, without processes and clocks.

Invariants: who serves, is being loaded or unloaded, or is pinned, loses nothing; of the others the least recently used
goes first, and no more go than must.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model that takes room. `used`: its last request's place among all."""

    name: str
    need: int
    used: int
    pinned: bool = False
    busy: bool = False  # it serves, or is being loaded or unloaded


def victims(budget: int, tenants: Iterable[Tenant], need: int, *, even_busy: bool = False) -> list[str] | None:
    """Who must go so that `need` bytes fit; None: they do not fit now. `even_busy`: also those that serve, as if they
    had ended."""
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
    """Whether it would not fit beside those that are pinned, even if nobody else were there."""
    return need > budget - sum(one.need for one in tenants if one.pinned)
