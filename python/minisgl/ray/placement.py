"""The engine pool's router over members that come and go and have names, not numbers.

Invariants: a number stands for one member until that has left; what has left holds no request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

from minisgl.ray.prefix import BYTES_PER_TOKEN, PAGE_BYTES
from minisgl.routing.api import RouterConfig
from minisgl.routing.backend import make_router
from minisgl.step import Int32Array

MAX_MEMBERS = 1024
M = TypeVar("M", bound=Hashable)


class Placement(Generic[M]):
    def __init__(self) -> None:
        self._router = make_router(RouterConfig("cache_aware", MAX_MEMBERS, page_size=PAGE_BYTES))
        self._numbers: dict[M, int] = {}
        self._members: dict[int, M] = {}

    def update(self, members: Mapping[M, Mapping[str, Any]]) -> None:
        """Who is there, with what each said last of its load (`server.health.load`; at first only `kv_tokens`)."""
        for gone in [one for one in self._numbers if one not in members]:
            self.leave(gone)
        for member, said in members.items():
            if member not in self._numbers:
                self._join(member, said)
            if member in self._numbers and "num_running" in said:
                self._router.report(self._numbers[member], int(said["num_waiting"]), int(said["num_running"]))

    def _join(self, member: M, said: Mapping[str, Any]) -> None:
        number = next((i for i in range(MAX_MEMBERS) if i not in self._members), None)
        if number is None:
            return  # Serve still knows it
        self._numbers[member], self._members[number] = number, member
        kv_tokens = said.get("kv_tokens")
        pages = None if kv_tokens is None else max(1, int(kv_tokens) * BYTES_PER_TOKEN // PAGE_BYTES)
        self._router.engine_up(number, pages)

    def leave(self, member: M) -> None:
        if (number := self._numbers.pop(member, None)) is not None:
            del self._members[number]
            self._router.engine_down(number)

    def place(self, request: int, prefix: Int32Array) -> M | None:
        """None: nobody is there."""
        if not self._members:
            return None
        self._router.add(request, prefix)
        placed = self._router.place()
        return self._members.get(placed[0].engine) if placed else None

    def remove(self, request: int) -> None:
        self._router.remove(request)

    def load(self, member: M) -> int:
        number = self._numbers.get(member)
        return 0 if number is None else self._router.loads()[number]
