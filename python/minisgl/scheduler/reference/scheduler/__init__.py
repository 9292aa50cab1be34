"""The reference scheduler as a whole: it applies events, decides steps and commits tokens.

Invariants: every schedule gets exactly one commit (or the `ForwardFailed` in place of it); every accepted request gets
exactly one end; a request slot is not assigned again before the last step that holds a row of it is committed; after an
error in the middle of a call, every later call is an error.

A step is decided in one pass (`step_pass`). Started requests get rows in order of (age, id): each decode row its token,
prefill rows what the decode rows leave of the token budget. Then waiting requests are admitted, in the same order,
until the first that gets nothing. Low-priority requests have a pass of their own after that, in steps in which no other
request is left waiting; they never affect the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from minisgl.scheduler.api import ControlPlaneConfig, ControlPlaneError, PartFailed, Stats, TreeView
from minisgl.scheduler.inputs import check_buffers, check_config, check_events, sampled_tokens
from minisgl.scheduler.parts import Parts
from minisgl.scheduler.reference import drafts, retraction
from minisgl.scheduler.reference.admission import prefill_admission_plan
from minisgl.scheduler.reference.invariants import TableWatch, check_all
from minisgl.scheduler.reference.metadata import DecidedStep, make_metadata_buffers, write_step
from minisgl.scheduler.reference.radix import RadixCache
from minisgl.scheduler.reference.request import Request, State, make_request
from minisgl.scheduler.reference.scheduler.step_pass import StepPass
from minisgl.scheduler.reference.state import InFlight, SchedulerState
from minisgl.step import (
    NOT_FINITE,
    UNBOUNDED,
    Abort,
    Arrival,
    ClearCache,
    Draft,
    Events,
    Finish,
    FinishReason,
    ForwardFailed,
    Int32Array,
    PagesRead,
    StepBuffers,
    StepOutput,
    StepPlan,
    TokenBudget,
    Unpin,
    step_output,
)

PYTHON = Parts(RadixCache, prefill_admission_plan, make_metadata_buffers)
"""The parts in Python."""


class ReferenceControlPlane:
    """The `ControlPlane` in Python, with which the others are compared. `parts` are its replaceable parts; it creates
    step buffers if `buffers` is `None`."""

    def __init__(self, config: ControlPlaneConfig, buffers: StepBuffers | None = None, parts: Parts = PYTHON) -> None:
        check_config(config)
        self.config = config
        self.limits = config.limits()
        self.parts = parts
        self.state = SchedulerState(config, parts)
        self.step_pass = StepPass(config, self.state, parts.plan_chunks)
        largest = max(config.graph_sizes, default=0)
        self._buffers = StepBuffers(self.limits, largest) if buffers is None else buffers
        check_buffers(config, self._buffers)
        self._num_arrivals = [0, 0]  # ordinary and low-priority arrivals
        self._last_step: int | None = None
        self._ends: list[tuple[int, int, int, int]] = []  # ends without a token, reported by the next commit
        self._watch = TableWatch(config.page_size)
        self._dead: str | None = None
        self.metadata_ns = 0  # time to write the last step's arrays; no decision depends on it

    @property
    def backend(self) -> str:
        """Name under which `scheduler.backend` creates this scheduler, without parts that have failed."""
        names = [name for name in self.parts.others if name not in self.part_failures]
        return "rust_parts:" + ",".join(names) if names else "python"

    @property
    def part_failures(self) -> dict[str, str]:
        """Error texts of the Rust parts that were replaced, by part name: see `Parts.failures`."""
        return self.parts.failures()

    # ------------------------------------------------------------------------------------------------ the Protocol

    @property
    def buffers(self) -> StepBuffers:
        return self._buffers

    def schedule(self, step: int, events: Events) -> StepPlan:
        """Decide a step: see `ControlPlane.schedule`. The first call may have any step number; then it goes up by 1."""
        self._require_alive()
        failed = bool(events.items) and isinstance(events.items[0], ForwardFailed)
        oldest = self.state.in_flight[0].step if self.state.in_flight else None
        check_events(events, self.state.live, oldest, self._pinned(failed), self.config)
        with self._changing(f"schedule({step})"):
            if self._last_step is not None and step != self._last_step + 1:
                raise ControlPlaneError(f"schedule({step}) came after schedule({self._last_step})")
            if len(self.state.in_flight) > 1 and not failed:
                raise ControlPlaneError(f"schedule({step}) came before commit({self.state.in_flight[0].step})")
            self._last_step = step
            self._apply(events)
            decided = self.step_pass.decide(step)
            began = time.perf_counter_ns()
            plan = self._write(decided)
            self.metadata_ns = time.perf_counter_ns() - began
            return plan

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        """Append a step's tokens: see `ControlPlane.commit`. Slots that waited for this step are freed first; then rows
        are processed in order."""
        self._require_alive()
        with self._changing(f"commit({step})"):
            if not self.state.in_flight or self.state.in_flight[0].step != step:
                raise ControlPlaneError(f"commit({step}) is not due")
            done = self.state.in_flight.popleft()
            sampled, not_finite = sampled_tokens(step, len(done.rows), done.sample_rows, tokens)
            self.state.slots.drain(step)
            entries, self._ends = self._ends, []
            ending: dict[Request, FinishReason] = {}
            for row, token in zip(done.sample_rows, sampled, strict=True):
                request = done.rows[row]
                request.num_pending -= row not in done.drafts
                counts = request.state is not State.ENDED and request not in ending and done.counts(row)
                if token == NOT_FINITE and (counts or row not in done.drafts):
                    not_finite.append(row)
                if token == NOT_FINITE or not counts:
                    continue
                self.step_pass.num_accepted += row in done.drafts
                reason = request.accept(token)
                entries.append((request.req_id, token, reason, row))
                if reason:
                    ending[request] = reason
            has_left = [done.rows[row] for row in not_finite if done.rows[row].state is State.ENDED]
            for row in not_finite:
                request = done.rows[row]
                if request.state is not State.ENDED and request not in ending:
                    ending[request] = FinishReason.ERROR
                    entries.append((request.req_id, -1, FinishReason.ERROR, row))
            self._settle(done, ending)
            for request, reason in ending.items():
                self._end(request, reason)
            for request in has_left:  # their KV is in the tree already
                retraction.drop_path(request, self.state.tree)
            self._propose(done)
            return step_output(step, entries)

    def stats(self) -> Stats:
        tree = self.state.tree
        return Stats(
            num_waiting=len(self.state.waiting),
            num_running=len(self.state.started),
            num_draining=self.state.slots.num_draining,
            num_free_pages=tree.num_free,
            num_evictable_pages=tree.num_evictable,
            num_protected_pages=tree.num_protected,
            num_held_pages=sum(len(request.pages) - request.num_tree_pages for request in self.state.started),
            num_retracted_total=self.step_pass.num_retracted,
            num_prompt_tokens_total=self.step_pass.num_prompt_tokens,
            num_cached_tokens_total=self.step_pass.num_cached_tokens,
            num_pinned_pages=self.state.pins.num_locked_pages(tree),
            num_inserted_pages_total=tree.num_inserted_total,
            num_evicted_pages_total=tree.num_evicted_total,
            num_hits_total=self.step_pass.num_hits,
            num_misses_total=self.step_pass.num_misses,
            num_drafted_total=self.step_pass.num_drafted,
            num_accepted_total=self.step_pass.num_accepted,
            num_checkpoints=tree.num_checkpoints,
            num_saved_total=self.step_pass.num_saved,
            num_cut_short_total=self.step_pass.num_cut_short,
            num_computed_again_total=self.step_pass.num_computed_again,
            num_loaded_pages_total=self.step_pass.num_loaded,
        )

    def tree_view(self, limit: int) -> TreeView:
        return self.state.tree.view(limit, set(self.state.pins.locked_nodes(self.state.tree)))

    def cached_pages(self, tokens: Int32Array, namespace: int) -> int:
        tree = self.state.tree
        match = tree.match(tree.root, tokens.tolist(), 0, len(tokens) // tree.page_size, namespace)
        if tree.has_states:
            match = tree.beginning(tree.root, match, (self._last_step or 0) + 1)
        return len(match.pages)

    def drafts_wanted(self) -> list[tuple[int, int]]:
        return drafts.find_draftable(self.state.started.items, self.config.max_draft_len, self.limits.max_rows)

    def check(self) -> None:
        self._require_alive()
        with self._changing("check()"):
            check_all(self.state)
            self._watch.check(self.state.started)

    # -------------------------------------------------------------------------------------------------- for tests

    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]:
        """Return each cached page with all tokens from the start of the sequence to the page's end: see
        `RadixTree.tree_pages`."""
        return self.state.tree.tree_pages()

    def tree_states(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the slot of each checkpoint in the tree with its path, in the format of `tree_pages`."""
        return self.state.tree.tree_states()

    def page_table(self, req_id: int) -> list[int]:
        """Return the page ids of a live request, by column; empty while it waits. Raises `KeyError` for others."""
        return list(self.state.live[req_id].pages)

    def free_pages(self) -> list[int]:
        """Return the stack of free pages; the next to be allocated is last."""
        return self.state.tree.free_pages()

    @property
    def reserve_ratio(self) -> int:
        """Current reserve ratio in 1/1024 (`ReserveRatio`). Tests set it."""
        return self.state.ratio.value

    @reserve_ratio.setter
    def reserve_ratio(self, value: int) -> None:
        self.state.ratio.value = value

    # ----------------------------------------------------------------------------------------------------- events

    def _pinned(self, failed: bool) -> dict[int, int]:
        """Return the pages that are pinned, or will be, by request. With `failed`, without those that the failed
        forward of the oldest step releases."""
        pages = self.state.pins.pages_by_request()
        if failed and self.state.in_flight:
            ending = {request.req_id for request in self.state.in_flight[0].rows}
            return {
                req_id: count for req_id, count in pages.items() if req_id in self.state.live and req_id not in ending
            }
        return pages

    def _apply(self, events: Events) -> None:
        for event in events:
            match event:
                case Arrival():
                    self._arrive(event)
                case Finish(req_id):
                    self._end_by_event(req_id, FinishReason.STOP)
                case ForwardFailed():
                    self._forward_failed()
                case Abort(req_id):
                    self._end_by_event(req_id, FinishReason.ABORT)
                case Unpin(req_id):
                    self.state.pins.drop(req_id, self.state.tree)
                case ClearCache():
                    self.state.tree.evict(self.state.tree.num_evictable)
                case TokenBudget(beside_decode, prefill_only, background):
                    self.step_pass.budgets = (beside_decode, prefill_only)
                    self.step_pass.background.gain = min(background, UNBOUNDED)
                case PagesRead(req_id, stored_from, stored_to):
                    request = self.state.live.get(req_id)
                    if request is not None and request.state is State.WAITING:
                        request.stored = (stored_from, stored_to)
                case Draft(req_id, length, tokens):
                    if (request := self.state.live.get(req_id)) is not None:
                        drafts.take(request, length, tokens)

    def _arrive(self, arrival: Arrival) -> None:
        """Queue a new request. A sequence that can never fit ends with an error at the next commit."""
        limit = self.limits.max_seq_len
        caches = self.config.cache != "naive"
        count = self._num_arrivals[bool(arrival.background)]
        request = make_request(arrival, count, limit, self.config.eos_ids, caches, self.config.max_draft_len)
        self._num_arrivals[request.is_background] += 1
        if len(request.tokens) >= limit:
            self._add_end(request.req_id, FinishReason.ERROR)
            return
        self.state.live[request.req_id] = request
        self.state.waiting.add(request)
        if arrival.pin:
            self.state.pins.register(request.req_id, request.num_prompt // self.limits.page_size)

    def _end_by_event(self, req_id: int, reason: FinishReason) -> None:
        """End a request because of an event. Ignores an id that is not live: its end is, or will be, reported."""
        request = self.state.live.get(req_id)
        if request is not None:
            self._end(request, reason)
            self._add_end(req_id, reason)

    def _forward_failed(self) -> None:
        """Undo a failed forward: the requests with a row in it end with an error, even retracted ones; all others start
        again from their committed tokens; pages, cache and slots are as at start. All slots in use become freed."""
        failed = self.state.in_flight[0].rows
        self.state.in_flight.clear()
        for request in self.state.started:
            self._requeue(request)
        self.state.started.clear()
        for request in self.state.live.values():
            request.num_pending = 0
            request.num_found_pages = None
        for request in failed:
            if request.state is not State.ENDED:
                self._end(request, FinishReason.ERROR)
                self._add_end(request.req_id, FinishReason.ERROR)
        self.state.tree.reset()
        self.state.pins.forget(self.state.live)
        self.state.slots.reset()

    def _add_end(self, req_id: int, reason: FinishReason) -> None:
        self._ends.append((req_id, -1, reason, -1))

    # ------------------------------------------------------------------------------------------- ends, retraction

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Remove a request. Its pages are released at once, except for the pin of a request that finished normally; its
        slot as soon as no step in flight holds a row of the request."""
        too_long = 0 < self.config.cache_max_prompt < request.num_prompt
        if request.state is State.STARTED:
            self.state.started.remove(request)
            self.step_pass.release_slot(request)
        else:
            self.state.waiting.remove(request)
        if reason is FinishReason.ERROR:
            if request.state is State.STARTED:
                retraction.free_pages(request, self.state.tree)
        elif too_long:
            retraction.drop_pages(request, self.state.tree)
        elif request.state is State.STARTED:
            retraction.give_up_pages(request, self.state.tree)
        request.state = State.ENDED
        del self.state.live[request.req_id]
        by_itself = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (by_itself and self.state.pins.holds(request.req_id)):
            self.state.pins.drop(request.req_id, self.state.tree)
        if reason is FinishReason.ERROR:
            retraction.drop_path(request, self.state.tree)

    def _requeue(self, request: Request) -> None:
        """Put a started request back into the waiting queue without releasing its pages, which are reset anyway."""
        retraction.forget_pages(request)
        request.state = State.WAITING
        self.state.waiting.add(request)

    # ------------------------------------------------------------------------------------------------------ a step

    def _write(self, decided: DecidedStep) -> StepPlan:
        ring = self._buffers.ring
        index = decided.step % len(ring)
        plan = write_step(decided, ring[index], self.limits, self.config.graph_sizes, self.parts.make_metadata)
        plan.ring_index = index
        plan.num_free_pages = self.state.tree.num_free
        plan.num_evictable_pages = self.state.tree.num_evictable
        self.state.in_flight.append(InFlight(decided.step, decided.rows(), decided.sample_rows(), decided.drafts()))
        return plan

    # ------------------------------------------------------------------------------------------------------ drafts

    def _settle(self, done: InFlight, ending: Mapping[Request, FinishReason]) -> None:
        """Free the pages of rejected draft tokens. (A request that was retracted meanwhile holds none; one with a row
        that is not finite loses all.)"""
        for request in dict.fromkeys(done.rows[row] for row in done.drafts):
            if request.state is State.STARTED and ending.get(request) is not FinishReason.ERROR:
                drafts.settle(request, self.state.tree)

    def _propose(self, done: InFlight) -> None:
        if self.config.max_draft_len:
            for request in dict.fromkeys(done.rows):
                if request.state is State.STARTED and not request.is_prefilling:
                    drafts.propose(request, self.state.tree)

    # ----------------------------------------------------------------------------------------------------- errors

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise ControlPlaneError(f"the scheduler is dead: {self._dead}")

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """Make the scheduler unusable if the body raises, because its state is then half changed; the caller gets a
        `ControlPlaneError`, or a `PartFailed` with a prefix cache in Rust. (The Rust side catches panics here.)"""
        try:
            yield
        except Exception as error:
            is_ours = isinstance(error, ControlPlaneError)
            self._dead = f"{call}: {error if is_ours else repr(error)}"
            if "radix" in self.parts.others:
                raise PartFailed("radix", self._dead) from error
            if is_ours:
                raise
            raise ControlPlaneError(self._dead) from error
