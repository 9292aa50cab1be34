"""What a scheduler is: the Protocol that the reference and the Rust implementation share.

Invariants: two calls per engine step, whatever the batch size; the same events give the same plans, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisgl.scheduler.policies import CachePolicy, SchedulePolicy
from minisgl.step import Events, Int32Array, StepBuffers, StepLimits, StepOutput, StepPlan

AGE = 64  # arrivals that a step of priority is worth


class ControlPlaneError(RuntimeError):
    """A broken invariant. The object that raised it refuses every later call."""


class PartFailed(ControlPlaneError):
    """An error that the part `part` of a scheduler raised, or left behind."""

    def __init__(self, part: str, what: str) -> None:
        super().__init__(what)
        self.part = part


def need(ok: bool, what: str) -> None:
    """`what` must hold between two calls."""
    if not ok:
        raise ControlPlaneError(f"broken invariant: {what}")


@dataclass(frozen=True, slots=True)
class ControlPlaneConfig:
    """Everything a scheduler decides by. `context_len` limits prompt + generated tokens of one request;
    `max_prefill_length` is the token budget of a step, unless a `TokenBudget` makes it smaller; `graph_sizes` are the
    padded row counts, ascending.

    `max_pinned_pages` limits what requests with `pin` keep in the tree; `cache_token_budget` what the tree keeps for
    nobody, `cache_max_prompt` the prompts that it keeps: 0 is no limit for these two. Of each request up to
    `max_draft_len` tokens are guessed and computed in one step: 0 is none.

    `checkpoint_interval` is above 0, in tokens of whole pages, for a model whose layers keep states: as often a long
    text saves its state, to one of `num_checkpoints` slots.

    `schedule_policy`: which waiting request starts next (`reference.ranking`)."""

    num_pages: int
    page_size: int
    max_running_requests: int
    max_prefill_length: int
    context_len: int
    eos_ids: tuple[int, ...] = ()
    cache: CachePolicy = "lru"
    graph_sizes: tuple[int, ...] = ()
    max_pinned_pages: int = 0
    cache_token_budget: int = 0  # tokens, in whole pages
    cache_max_prompt: int = 0  # tokens
    max_draft_len: int = 0
    checkpoint_interval: int = 0
    num_checkpoints: int = 0
    schedule_policy: SchedulePolicy = "fcfs"

    @property
    def num_pinnable_pages(self) -> int:
        """The most that `max_pinned_pages` can be: beside them the longest request still runs. The last token of a
        request needs no KV."""
        return self.num_pages - -(-(self.limits().max_seq_len - 1) // self.page_size)

    def limits(self) -> StepLimits:
        """Decode rows are scheduled whatever the budget, and the first prefill gets a page whatever is left."""
        return StepLimits(
            max_rows=self.max_running_requests,
            max_tokens=self.max_running_requests + max(self.max_prefill_length, self.page_size),
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_seq_len=min(self.context_len, self.num_pages * self.page_size + 1),
            num_checkpoints=self.num_checkpoints,
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of this moment. free + evictable + protected + held pages = all pages."""

    num_waiting: int
    num_running: int  # started rows, prefilling or decoding
    num_draining: int
    num_free_pages: int
    num_evictable_pages: int
    num_protected_pages: int
    num_held_pages: int
    num_retracted_total: int
    num_prompt_tokens_total: int  # of admitted requests, first admission only
    num_cached_tokens_total: int  # of these, found in the cache or loaded with the first chunk
    num_pinned_pages: int = 0  # of the protected ones, those that pins hold
    num_inserted_pages_total: int = 0  # into the tree
    num_evicted_pages_total: int = 0  # that have left the tree, for whatever reason
    num_hits_total: int = 0  # requests of whose prompt some was cached at their first admission
    num_misses_total: int = 0  # the other requests that were admitted
    num_drafted_total: int = 0  # tokens that were guessed and computed
    num_accepted_total: int = 0  # of them, those that were right
    num_checkpoints: int = 0  # slots of states that nodes or requests have
    num_saved_total: int = 0  # states that were saved
    num_cut_short_total: int = (
        0  # requests that found less at their first admission than was cached: without a checkpoint
    )
    num_computed_again_total: int = 0  # tokens that were cached, and computed for their states
    num_loaded_pages_total: int = 0  # that the engine was told to load

    @property
    def num_live(self) -> int:
        return self.num_waiting + self.num_running


TreeNode = tuple[int, int, int, int, int, int, int, bool, bool, list[int]]
"""A node of the prefix cache: id (above 0), that of its parent (0: the root), tokens, tokens from the root to its end,
locks, age (ticks of the cache's clock since nobody holds it), children, whether a pin holds it, whether the state
at its end is kept (of a model that has states), its first tokens."""
TreeView = tuple[int, int, list[TreeNode]]
"""Nodes and tokens of the whole tree, and of its nodes those with the most tokens, of as many those with lower ids."""


class ControlPlane(Protocol):
    def schedule(self, step: int, events: Events) -> StepPlan:
        """Take in `events`, decide step `step` (one more than the last), write its arrays, return its header.

        Called at most once more than `commit`. Raises `EventError` (nothing changed, the call may be repeated),
        `ControlPlaneError` (the object is dead). The returned object is valid until the call after the next.
        """

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        """Take the tokens of `step`, [num_rows] int32 by row (rows that do not sample hold anything). `NOT_FINITE` in
        any row ends its request with an error; other rows do not notice."""

    def stats(self) -> Stats: ...

    def tree_view(self, limit: int) -> TreeView:
        """The prefix cache with its `limit` largest nodes, for people who watch. Reads only. O(nodes)."""

    def cached_pages(self, tokens: Int32Array, namespace: int) -> int:
        """How many whole pages of `tokens` the prefix cache has for requests of `namespace`, of a model with states up
        to the last checkpoint: others may be read from a disk before an arrival. Reads only. O(tokens)."""

    def drafts_wanted(self) -> list[tuple[int, int]]:
        """For whom a `Draft` may be of use, and of how many tokens: requests that decode and do not pause, of which
        nothing is guessed already. Of those with a token in flight that is certain after its commit only. Nobody while
        a prompt is being computed, or where a step has no rows for the longest draft of everybody who has started.
        Reads only. O(started requests)."""

    def check(self) -> None:
        """Check every invariant; raises `ControlPlaneError`. O(everything)."""

    @property
    def buffers(self) -> StepBuffers: ...


def metadata_time_ns(control_plane: ControlPlane) -> int:
    """What writing the arrays of the last step took, for a meter; 0 from one that does not tell."""
    return int(getattr(control_plane, "metadata_ns", 0))


def backend_of(control_plane: ControlPlane) -> str:
    """The name by which `scheduler.backend` makes it."""
    return str(getattr(control_plane, "backend", "rust_hotpath"))


def part_failures(control_plane: ControlPlane) -> dict[str, str]:
    """The parts of it that failed and were replaced, and how they failed."""
    return dict(getattr(control_plane, "part_failures", {}))
