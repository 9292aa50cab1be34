"""Interfaces of the three replaceable parts of the Python scheduler: the prefix cache, the sizing of prefill chunks,
and the step's metadata arrays. `ReferenceControlPlane` takes Python parts, Rust ones (`minisgl.hotpath`) or others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.scheduler.api import TreeView
from minisgl.scheduler.policies import CachePolicy
from minisgl.step import Int32Array

Handle = Any
"""A node of a prefix cache, opaque to callers: a `Node` in Python, an integer in Rust."""
Shape = list[tuple[Any, Any, int, list[int], int]]
"""All nodes but the root, each as key, parent's key, lock count, pages, checkpoint slot (-1: none)."""


class PrefixMatch(Protocol):
    """The longest cached continuation of a token sequence below a node of the prefix cache."""

    @property
    def pages(self) -> list[int]: ...
    @property
    def num_unlocked(self) -> int:
        """Matched pages that can be evicted until the match is locked."""

    @property
    def end(self) -> Handle | None:
        """The last node of the match; `None` if the match ends in the middle of an edge."""


class PrefixTree(Protocol):
    """A prefix cache with its page pool. `radix.RadixTree` documents each method."""

    @property
    def root(self) -> Handle: ...
    @property
    def page_size(self) -> int: ...
    @property
    def policy(self) -> CachePolicy: ...
    @property
    def has_states(self) -> bool: ...
    @property
    def num_available(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_evictable(self) -> int: ...
    @property
    def num_protected(self) -> int: ...
    @property
    def num_inserted_total(self) -> int: ...
    @property
    def num_evicted_total(self) -> int: ...
    @property
    def num_checkpoints(self) -> int: ...

    def match(
        self, node: Handle, tokens: list[int], first_page: int, max_pages: int, namespace: int = 0
    ) -> PrefixMatch: ...
    def beginning(self, node: Handle, match: Any, step: int) -> PrefixMatch: ...
    def has_page(self, node: Handle, tokens: list[int], column: int, namespace: int = 0) -> bool: ...
    def following(self, node: Handle, tokens: list[int], first_page: int, count: int, namespace: int) -> list[int]: ...
    def descend(self, handle: Handle, match: Any) -> Handle: ...
    def release(self, handle: Handle) -> None: ...
    def append(self, handle: Handle, tokens: list[int], pages: list[int], namespace: int = 0) -> Handle: ...
    def insert(
        self, handle: Handle, tokens: list[int], pages: list[int], first_page: int, namespace: int = 0
    ) -> tuple[Handle, int]: ...
    def take(self, num_pages: int) -> list[int]: ...
    def free(self, pages: list[int]) -> None: ...
    def evict(self, num_pages: int) -> object: ...
    def drop(self, node: Handle, depth: int, keep: int) -> None: ...
    def reset(self) -> None: ...
    def save(self, match: Any, step: int) -> int | None: ...
    def take_slot(self) -> int | None: ...
    def free_slot(self, slot: int) -> None: ...
    def checkpoint(self, node: Handle) -> int: ...
    def put_checkpoint(self, node: Handle, slot: int, step: int) -> None: ...
    def use_checkpoint(self, node: Handle) -> None: ...
    def settle_checkpoints(self) -> None: ...
    def hold_deepest(self, handle: Handle) -> Handle | None: ...
    def unhold(self, node: Handle) -> None: ...
    def check_integrity(self) -> None: ...
    def free_pages(self) -> list[int]: ...
    def free_slots(self) -> list[int]: ...
    def held_slots(self) -> list[int]: ...
    def shape(self) -> Shape: ...
    def path(self, node: Handle) -> tuple[list[int], list[int]]: ...
    def path_nodes(self, node: Handle) -> list[tuple[Any, int]]: ...
    def view(self, limit: int, pinned: set[Any]) -> TreeView: ...
    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]: ...
    def tree_states(self) -> list[tuple[tuple[int, ...], int]]: ...


Candidate = tuple[int, int, int, int, int, int, bool, int]
"""A request that needs a chunk: tokens of its sequence, its pages, matched pages after those, how many of these are
not locked, all cached pages, pages that can be loaded after the match, whether the row then begins with a stored state,
tokens that it may still generate."""
PlannedChunk = tuple[int, int, bool, int, int, int, int]
"""Tokens to compute, new pages, whether more pages would give more tokens, cached pages to recompute for the state,
pages to load, cost in tokens of the budget, pages that the estimate lacks. For a row that gets nothing all but the last
are 0."""


class PlanChunks(Protocol):
    def __call__(
        self,
        candidates: list[Candidate],
        *,
        budget: int,
        available: int,
        page_size: int,
        max_page_changes: int,
        reserve_ratio: int,
        needed: int,
    ) -> list[PlannedChunk]:
        """Size the next prefill chunks of `candidates`, in order, up to the first that gets nothing or for which the
        estimate lacks pages."""


class MakeMetadata(Protocol):
    def __call__(
        self, starts: list[int], extend_lens: list[int], pages: list[int], page_size: int
    ) -> Mapping[str, Int32Array]:
        """Return int32 arrays for rows that compute `extend_lens` tokens from positions `starts`: `positions` and
        `out_loc` [num_tokens], `seq_lens` and `last_page_len` [num_rows], `qo_indptr` and `kv_indptr` [num_rows + 1].
        `pages` has, row by row, the page ids that hold those tokens."""


MakeTree = Callable[[int, int, CachePolicy, int | None], PrefixTree]
"""Creates a prefix cache: number of pages, page size, policy, state slots (`None`: no recurrent layers)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a Python scheduler uses. `others` names those that are not the Python ones."""

    tree: MakeTree
    plan_chunks: PlanChunks
    make_metadata: MakeMetadata
    others: tuple[str, ...] = ()

    def failures(self) -> dict[str, str]:
        """Return the error texts of the Rust parts that were replaced by their Python versions, by part name."""
        by_name = {"admission": self.plan_chunks, "metadata": self.make_metadata}
        texts = {name: getattr(part, "failure", "") for name, part in by_name.items()}
        return {name: failure for name, failure in texts.items() if failure}
