"""Nodes of the radix tree and their keys."""

from __future__ import annotations

from dataclasses import dataclass, field

PageKey = tuple[int, ...]  # the namespace and the tokens of one page
NO_CHECKPOINT = -1


def page_key(namespace: int, tokens: list[int]) -> PageKey:
    """Return the key of a child whose first page has these `tokens`."""
    return (namespace, *tokens)


@dataclass(slots=True, eq=False)
class Node:
    """A radix-tree node with the edge above it: `pages` hold the KV of `tokens`, len(pages) * page_size of them."""

    parent: Node | None
    tokens: list[int]
    pages: list[int]
    children: dict[PageKey, Node] = field(default_factory=dict)
    lock: int = 0
    stamp: int = 0
    frequency: int = 0
    namespace: int = 0  # equal within a branch; meaningless for the root
    checkpoint: int = NO_CHECKPOINT  # state slot of its end
    saved_in: int = 0  # step that saves the state

    @property
    def is_evictable_leaf(self) -> bool:
        return self.lock == 0 and not self.children and self.parent is not None
