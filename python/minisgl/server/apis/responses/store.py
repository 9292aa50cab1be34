"""Answers that clients may come back to, in memory.

Invariants: at most so many, of so many bytes together; beyond that the oldest is forgotten of the key that has most, so
that no key pushes out another's that has less; whose key differs from that of the one who asked finds nothing.
"""

from __future__ import annotations

import collections
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
_ENTRY_BYTES = 1024  # of an entry beside its texts, about


@dataclass(frozen=True, slots=True)
class Entry:
    """Encoded: as objects they would take many times the memory."""

    key: int
    response: bytes
    input_items: bytes
    item_ids: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + sum(map(len, self.item_ids)) + _ENTRY_BYTES


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._response_of: dict[str, str] = {}  # by item of its output
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: dict[str, Any], input_items: list[dict[str, Any]], key: int) -> None:
        """What is larger than the whole store is not kept."""
        name = response["id"]
        item_ids = tuple(item["id"] for item in response["output"])
        self._put(name, Entry(key, msgspec.json.encode(response), msgspec.json.encode(input_items), item_ids))

    def _put(self, name: str, entry: Entry) -> None:
        self._drop(name)
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[name] = entry
        self._response_of.update(dict.fromkeys(entry.item_ids, name))
        self.num_bytes += entry.num_bytes
        if len(self._entries) > self._max_responses:
            self._drop(self._oldest_of_most(lambda _: 1))
        while self.num_bytes > self._max_bytes:
            self._drop(self._oldest_of_most(lambda one: one.num_bytes))

    def _oldest_of_most(self, weight: Callable[[Entry], int]) -> str:
        """The oldest answer of the key whose answers weigh most together; of equals, of the one with the oldest."""
        weights = collections.Counter[int]()
        for one in self._entries.values():
            weights[one.key] += weight(one)
        [(most, _)] = weights.most_common(1)
        return next(name for name, one in self._entries.items() if one.key == most)

    def response(self, name: str, key: int) -> bytes | None:
        entry = self._find(name, key)
        return None if entry is None else entry.response

    def input_items(self, name: str, key: int) -> list[dict[str, Any]] | None:
        entry = self._find(name, key)
        return None if entry is None else msgspec.json.decode(entry.input_items, type=list[dict[str, Any]])

    def output(self, name: str, key: int) -> list[dict[str, Any]] | None:
        entry = self._find(name, key)
        return None if entry is None else msgspec.json.decode(entry.response)["output"]

    def item(self, item_id: str, key: int) -> dict[str, Any] | None:
        """The items in the output of any answer."""
        found = self.output(self._response_of.get(item_id, ""), key) or []
        return next((item for item in found if item["id"] == item_id), None)

    def delete(self, name: str, key: int) -> bool:
        """Whether it was there."""
        return self._find(name, key) is not None and self._drop(name)

    def _find(self, name: str, key: int) -> Entry | None:
        entry = self._entries.get(name)
        return entry if entry is not None and entry.key == key else None

    def _drop(self, name: str) -> bool:
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        for item_id in entry.item_ids:
            del self._response_of[item_id]
        return True
