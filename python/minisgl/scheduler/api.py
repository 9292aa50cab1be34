"""The scheduler's interface: the `ControlPlane` protocol that the Python reference and the Rust implementation share.

Invariants: two calls per engine step, whatever the batch size; equal events give bit-identical plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisgl.scheduler.policies import CachePolicy, SchedulePolicy
from minisgl.step import Events, Int32Array, StepBuffers, StepLimits, StepOutput, StepPlan

AGE = 64  # arrivals by which one step of priority goes earlier


class ControlPlaneError(RuntimeError):
    """Error for a broken scheduler invariant. The object that raised it refuses every later call."""


class PartFailed(ControlPlaneError):
    """Error that the replaceable part `part` of a scheduler raised or caused."""

    def __init__(self, part: str, what: str) -> None:
        super().__init__(what)
        self.part = part


def need(ok: bool, what: str) -> None:
    """Raise `ControlPlaneError` with the text `what` if the invariant `ok` is false."""
    if not ok:
        raise ControlPlaneError(f"broken invariant: {what}")


@dataclass(frozen=True, slots=True)
class ControlPlaneConfig:
    """Scheduler configuration. 0 means "no limit" only where that is said.
    - `context_len`: prompt + generated tokens that one request may have at most.
    - `max_prefill_length`: token budget of a step; a `TokenBudget` event may lower it.
    - `graph_sizes`: padded row counts, ascending.
    - `max_pinned_pages`: pages that requests with `pin` may keep in the prefix cache.
    - `cache_token_budget`: cached tokens that no request uses (0: no limit). `cache_max_prompt`: the longest prompt
      that is cached (0: no limit).
    - `max_draft_len`: draft tokens of a request that one step may verify (0: no drafts).
    - `checkpoint_interval`: above 0 only for models with recurrent layers: tokens (whole pages) between two state
      snapshots of a sequence; `num_checkpoints` is the number of snapshot slots.
    - `schedule_policy`: the order of waiting requests (`reference.ranking`)."""

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
        """Upper limit of `max_pinned_pages`: all pages but those that the longest request needs. The last token of a
        request needs no KV."""
        return self.num_pages - -(-(self.limits().max_seq_len - 1) // self.page_size)

    def limits(self) -> StepLimits:
        """Return the maximal sizes of a step. Decode rows run whatever the budget, the first prefill gets a page."""
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
    """Scheduler counters; without `_total`, current values. free + evictable + protected + held pages = all pages."""

    num_waiting: int
    num_running: int  # started rows, prefilling or decoding
    num_draining: int
    num_free_pages: int
    num_evictable_pages: int
    num_protected_pages: int
    num_held_pages: int
    num_retracted_total: int
    num_prompt_tokens_total: int  # tokens of prompts at their first admission
    num_cached_tokens_total: int  # prompt tokens that were cached, or loaded with the first chunk
    num_pinned_pages: int = 0  # protected pages that pins hold
    num_inserted_pages_total: int = 0  # pages that entered the prefix cache
    num_evicted_pages_total: int = 0  # pages that left the prefix cache, for any reason
    num_hits_total: int = 0  # requests with cached tokens at their first admission
    num_misses_total: int = 0  # requests without cached tokens at their first admission
    num_drafted_total: int = 0  # draft tokens that were computed
    num_accepted_total: int = 0  # draft tokens that were accepted
    num_checkpoints: int = 0  # state slots in use
    num_saved_total: int = 0  # saved states
    num_cut_short_total: int = 0  # requests that could not use all of their cached pages, for lack of a checkpoint
    num_computed_again_total: int = 0  # cached tokens that were recomputed for their states
    num_loaded_pages_total: int = 0  # pages loaded from the page store

    @property
    def num_live(self) -> int:
        return self.num_waiting + self.num_running


TreeNode = tuple[int, int, int, int, int, int, int, bool, bool, list[int]]
"""A node of the prefix cache: id (above 0), parent's id (0: the root), tokens, tokens from the root to its end, locks,
age (ticks of the cache's clock since its last unlock), children, whether a pin holds it, whether it has a state
checkpoint, its first tokens."""
TreeView = tuple[int, int, list[TreeNode]]
"""Node count and token count of the whole tree, and its largest nodes (among equal sizes, those with lower ids)."""


class ControlPlane(Protocol):
    def schedule(self, step: int, events: Events) -> StepPlan:
        """Apply `events`, plan step `step` (the previous one + 1), write its arrays into the ring, and return the
        header. At most one more step may be scheduled than committed. Raises `EventError` (nothing has changed; the
        call may be repeated) and `ControlPlaneError` (the scheduler is unusable). The returned plan is valid until the
        call after the next."""

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        """Append the sampled tokens of step `step`. `tokens` is int32 [num_rows]; rows that do not sample may hold any
        value. `NOT_FINITE` in a row ends its request with an error and leaves the other rows alone."""

    def stats(self) -> Stats: ...

    def tree_view(self, limit: int) -> TreeView:
        """Return the prefix cache's size and its `limit` largest nodes, for monitoring. Reads only. O(nodes)."""

    def cached_pages(self, tokens: Int32Array, namespace: int) -> int:
        """Return how many whole pages of `tokens` are cached in `namespace`; with recurrent layers, up to the last
        state snapshot. The caller may read further pages from disk before the request arrives. Reads only. O(tokens).
        """

    def drafts_wanted(self) -> list[tuple[int, int]]:
        """Return (request id, max. draft length) of the decoding requests that can use a `Draft` event: those without a
        draft that are not in a pause after rejected drafts. With a token in flight, only its commit shows whether a
        draft is of use. Empty while any started request prefills, or if a step has too few rows for the longest draft
        of every started request. Reads only. O(started requests)."""

    def check(self) -> None:
        """Check every invariant. Raises `ControlPlaneError` at the first broken one. O(whole state)."""

    @property
    def buffers(self) -> StepBuffers: ...


def metadata_time_ns(control_plane: ControlPlane) -> int:
    """Return the nanoseconds that writing the arrays of the last step took; 0 if the scheduler does not measure it."""
    return int(getattr(control_plane, "metadata_ns", 0))


def backend_of(control_plane: ControlPlane) -> str:
    """Return the name under which `scheduler.backend` creates this scheduler, such as "python" or "rust_hotpath"."""
    return str(getattr(control_plane, "backend", "rust_hotpath"))


def part_failures(control_plane: ControlPlane) -> dict[str, str]:
    """Return the error texts of the Rust parts that failed and were replaced by Python, by part name."""
    return dict(getattr(control_plane, "part_failures", {}))
