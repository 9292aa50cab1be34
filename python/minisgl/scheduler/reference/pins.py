"""Pins: prompt pages that stay in the tree after their request has ended.

Invariants: the pages of all pins, shared ones counted for each, are within the limit from the arrival of their requests
on; a pin locks its pages from the step on in which the last of them was scheduled, whatever happens to the request.
Because it locks so early, every request that finishes normally has its pin: a retraction before its last token removes
nothing.
"""

from __future__ import annotations

from collections.abc import Container, ItemsView
from dataclasses import dataclass
from typing import Any

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.parts import Handle, PrefixTree
from minisgl.scheduler.reference.request import Request


@dataclass(slots=True, eq=False)
class Pin:
    """A pin on the first `num_pages` pages of a prompt. `handle` is the locked node of the tree, `None` before."""

    num_pages: int
    handle: Handle | None = None
    saved: Handle | None = None  # the deepest node with a checkpoint on its path, held too


class Pins:
    """All pins by request id, of live and of finished requests."""

    __slots__ = ("_pins", "max_pages", "num_pages")

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.num_pages = 0  # shared pages count once per pin
        self._pins: dict[int, Pin] = {}

    def items(self) -> ItemsView[int, Pin]:
        return self._pins.items()

    def pages_by_request(self) -> dict[int, int]:
        return {req_id: pin.num_pages for req_id, pin in self._pins.items()}

    def register(self, req_id: int, num_pages: int) -> None:
        """Count `num_pages` pages for a request that has arrived and will pin them."""
        self._pins[req_id] = Pin(num_pages)
        self.num_pages += num_pages

    def take(self, request: Request, tree: PrefixTree) -> bool:
        """Lock the pages of the request's pin once the last of them is scheduled. Returns whether it did so now."""
        pin = self._pins.get(request.req_id)
        if pin is None or pin.handle is not None or request.kv_len < pin.num_pages * tree.page_size:
            return False
        match = tree.match(tree.root, request.tokens, 0, pin.num_pages, request.namespace)
        if len(match.pages) != pin.num_pages:
            raise ControlPlaneError(f"request {request.req_id}: {len(match.pages)} of {pin.num_pages} pages to pin")
        pin.handle = tree.descend(tree.root, match)
        return True

    def hold(self, req_id: int, tree: PrefixTree) -> None:
        """Exempt the deepest checkpoint on the pinned path from eviction. Called after the step's saves."""
        pin = self._pins[req_id]
        if tree.has_states:
            pin.saved = tree.hold_deepest(pin.handle)

    def holds(self, req_id: int) -> bool:
        """Return whether the pin of the request has locked its pages."""
        pin = self._pins.get(req_id)
        return pin is not None and pin.handle is not None

    def drop(self, req_id: int, tree: PrefixTree) -> None:
        """Remove the pin of a request, so that its pages may be evicted. Does nothing if there is none."""
        pin = self._pins.pop(req_id, None)
        if pin is not None:
            self.num_pages -= pin.num_pages
            if pin.saved is not None:
                tree.unhold(pin.saved)
            if pin.handle is not None:
                tree.release(pin.handle)

    def forget(self, live: Container[int]) -> None:
        """Reset after the tree was emptied: pins of live requests will lock again, the others are removed."""
        self._pins = {req_id: Pin(pin.num_pages) for req_id, pin in self._pins.items() if req_id in live}
        self.num_pages = sum(pin.num_pages for pin in self._pins.values())

    def num_locked_pages(self, tree: PrefixTree) -> int:
        """Return how many pages of the tree are locked by a pin."""
        return sum(self.locked_nodes(tree).values())

    def locked_nodes(self, tree: PrefixTree) -> dict[Any, int]:
        """Return the page counts of the nodes that a pin locks, by node key."""
        handles = [pin.handle for pin in self._pins.values() if pin.handle is not None]
        return {key: num_pages for handle in handles for key, num_pages in tree.path_nodes(handle)}
