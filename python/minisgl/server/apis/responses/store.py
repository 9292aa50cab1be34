"""In-memory store of responses, for later requests that refer to them.

Invariants: at most `max_responses` and `max_bytes`; when full, the oldest response of the key with most is evicted, so
that no key evicts another that has less; a caller with another key finds nothing.
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
_ENTRY_BYTES = 1024  # approximate overhead of an entry


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Stored response, kept as encoded JSON: as objects it would take many times the memory."""

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
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of: dict[str, str] = {}  # response ids by output item id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: dict[str, Any], input_items: list[dict[str, Any]] | msgspec.Raw, key: int) -> None:
        """Store a response with its input items (or their JSON). A response larger than the whole store is dropped."""
        name = response["id"]
        item_ids = tuple(item["id"] for item in response["output"])
        self._put(name, StoredResponse(key, msgspec.json.encode(response), msgspec.json.encode(input_items), item_ids))

    def _put(self, name: str, entry: StoredResponse) -> None:
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

    def _oldest_of_most(self, weight: Callable[[StoredResponse], int]) -> str:
        """Return the oldest response of the key with the highest total weight; on a tie, the oldest of all."""
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
        """Return an item by id from the output of any stored response; `None` if no response of the key has it."""
        items = self.output(self._response_of.get(item_id, ""), key) or []
        return next((item for item in items if item["id"] == item_id), None)

    def delete(self, name: str, key: int) -> bool:
        """Delete a stored response of the key. Return whether it existed."""
        return self._find(name, key) is not None and self._drop(name)

    def _find(self, name: str, key: int) -> StoredResponse | None:
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
