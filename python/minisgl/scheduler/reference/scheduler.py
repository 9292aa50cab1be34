"""The scheduler as a whole: takes events, decides steps, takes tokens.

Keeps true: every schedule gets exactly one commit (or the `ForwardFailed` that stands in for it); every accepted
request leaves exactly one end; a request slot is not assigned again before the last step that holds a row of it is
committed; an error in the middle of a call makes every later call an error.
Doesn't know: tensors, text, time but for a meter.

One pass makes a step. Started rows go in order of (priority, arrival, id): each decode row gets its token, prefill
rows share what the decode rows leave of the token budget. Then waiting requests are admitted, in the same order, until
the first that gets nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from minisgl.scheduler.api import ControlPlaneConfig, ControlPlaneError, Stats
from minisgl.scheduler.inputs import check_buffers, check_config, check_events, sampled_tokens
from minisgl.scheduler.reference import admission, decode_set, retraction
from minisgl.scheduler.reference.invariants import TableWatch, check_all
from minisgl.scheduler.reference.metadata import DecidedStep, PrefillRow, write_step
from minisgl.scheduler.reference.request import Request, State, make_request
from minisgl.scheduler.reference.state import InFlight, SchedulerState
from minisgl.step import (
    Abort,
    Arrival,
    Events,
    Finish,
    FinishReason,
    ForwardFailed,
    Int32Array,
    StepBuffers,
    StepOutput,
    StepPlan,
    step_output,
)


class ReferenceControlPlane(SchedulerState):
    """`ControlPlane` in Python, the one that others are compared with. Without `buffers` it makes its own."""

    def __init__(self, config: ControlPlaneConfig, buffers: StepBuffers | None = None) -> None:
        check_config(config)
        super().__init__(config)
        self.config = config
        self.limits = config.limits()
        largest = max(config.graph_sizes, default=0)
        self._buffers = StepBuffers(self.limits, largest) if buffers is None else buffers
        check_buffers(config, self._buffers)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_retracted = 0
        self._num_arrivals = 0
        self._last_step: int | None = None
        self._ends: list[tuple[int, int, int, int]] = []  # without a token; they leave with the next commit
        self._watch = TableWatch()
        self._dead: str | None = None
        self.metadata_ns = 0  # what writing the last step's arrays took: for meters, nothing is decided by it

    # ------------------------------------------------------------------------------------------------ the Protocol

    @property
    def buffers(self) -> StepBuffers:
        return self._buffers

    def schedule(self, step: int, events: Events) -> StepPlan:
        """See `ControlPlane.schedule`. The first call may name any step; the others go on from there."""
        self._require_alive()
        failed = bool(events.items) and isinstance(events.items[0], ForwardFailed)
        check_events(events, self.live, self.in_flight[0].step if self.in_flight else None)
        with self._changing(f"schedule({step})"):
            if self._last_step is not None and step != self._last_step + 1:
                raise ControlPlaneError(f"schedule({step}) came after schedule({self._last_step})")
            if len(self.in_flight) > 1 and not failed:
                raise ControlPlaneError(f"schedule({step}) came before commit({self.in_flight[0].step})")
            self._last_step = step
            self._apply(events)
            decided = self._decide(step)
            began = time.perf_counter_ns()
            plan = self._write(decided)
            self.metadata_ns = time.perf_counter_ns() - began
            return plan

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        """See `ControlPlane.commit`. First the slots that waited for this step get free, then the rows in order."""
        self._require_alive()
        with self._changing(f"commit({step})"):
            if not self.in_flight or self.in_flight[0].step != step:
                raise ControlPlaneError(f"commit({step}) is not due")
            done = self.in_flight.popleft()
            sampled = sampled_tokens(step, len(done.rows), done.sample_rows, tokens)
            self.slots.drain(step)
            entries, self._ends = self._ends, []
            for row, token in zip(done.sample_rows, sampled, strict=True):
                request = done.rows[row]
                request.num_pending -= 1
                if request.state is State.ENDED:
                    continue
                reason = request.accept(token)
                entries.append((request.req_id, token, reason, row))
                if reason:
                    self._end(request)
            return step_output(step, entries)

    def stats(self) -> Stats:
        tree = self.tree
        return Stats(
            num_waiting=len(self.waiting),
            num_running=len(self.started),
            num_draining=self.slots.num_draining,
            num_free_pages=tree.pool.num_free,
            num_evictable_pages=tree.num_evictable,
            num_protected_pages=tree.num_protected,
            num_held_pages=sum(len(request.pages) - request.num_tree_pages for request in self.started),
            num_retracted_total=self.num_retracted,
            num_prompt_tokens_total=self.num_prompt_tokens,
            num_cached_tokens_total=self.num_cached_tokens,
        )

    def check(self) -> None:
        self._require_alive()
        with self._changing("check()"):
            check_all(self)
            self._watch.check(self.started)

    # -------------------------------------------------------------------------------------------------- for tests

    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]:
        """Each cached page, with all tokens from the start of the sequence to the page's end."""
        return self.tree.tree_pages()

    def page_table(self, req_id: int) -> list[int]:
        """The pages of a live request, by column; empty while it waits. `KeyError` if it isn't live."""
        return list(self.live[req_id].pages)

    def free_pages(self) -> list[int]:
        """The stack of free pages, the next to be given out last."""
        return self.tree.pool.free_pages()

    @property
    def reserve_ratio(self) -> int:
        """See `ReserveRatio`; tests set it."""
        return self.ratio.value

    @reserve_ratio.setter
    def reserve_ratio(self, value: int) -> None:
        self.ratio.value = value

    # ----------------------------------------------------------------------------------------------------- events

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

    def _arrive(self, arrival: Arrival) -> None:
        """Into the queue; a prompt that could never fit is answered with an error at once."""
        limit = self.limits.max_seq_len
        caches = self.config.cache != "naive"
        request = make_request(arrival, self._num_arrivals, limit, self.config.eos_ids, caches)
        self._num_arrivals += 1
        if len(request.tokens) >= limit:
            self._add_end(request.req_id, FinishReason.ERROR)
            return
        self.live[request.req_id] = request
        self.waiting.add(request)

    def _end_by_event(self, req_id: int, reason: FinishReason) -> None:
        """No-op for an id that isn't live: it has ended, and its end is on the way."""
        request = self.live.get(req_id)
        if request is not None:
            self._end(request)
            self._add_end(req_id, reason)

    def _forward_failed(self) -> None:
        """The requests with a row in the failed step end, retracted ones too; everyone else starts from zero, with
        its committed tokens; pages, cache and slots are as at start. All slots in use count as freed."""
        failed = self.in_flight[0].rows
        self.in_flight.clear()
        for request in self.started:
            self._requeue(request)
        self.started.clear()
        for request in self.live.values():
            request.num_pending = 0
        for request in failed:
            if request.state is not State.ENDED:
                self._end(request)
                self._add_end(request.req_id, FinishReason.ERROR)
        self.tree.pool.reset()
        self.tree.reset()
        self.slots.reset()

    def _add_end(self, req_id: int, reason: FinishReason) -> None:
        self._ends.append((req_id, -1, reason, -1))

    # ------------------------------------------------------------------------------------------- ends, retraction

    def _end(self, request: Request) -> None:
        """Pages go at once; the slot as soon as no step in flight holds a row of the request."""
        if request.state is State.STARTED:
            self.started.remove(request)
            self._release_slot(request)
            retraction.give_up_pages(request, self.tree)
        else:
            self.waiting.remove(request)
        request.state = State.ENDED
        del self.live[request.req_id]

    def _retract(self, request: Request) -> None:
        """Back to its place in the queue. A token in flight is still taken at its commit, and may end it there."""
        self.started.remove(request)
        self._release_slot(request)
        retraction.give_up_pages(request, self.tree)
        self.num_retracted += 1
        request.state = State.WAITING
        self.waiting.add(request)

    def _requeue(self, request: Request) -> None:
        """Like a retraction, where the pages are gone anyway."""
        retraction.forget_pages(request)
        request.state = State.WAITING
        self.waiting.add(request)

    def _release_slot(self, request: Request) -> None:
        is_in_flight = bool(self.in_flight) and request.last_step >= self.in_flight[0].step
        self.slots.free(request.slot, request.last_step if is_in_flight else None)

    # --------------------------------------------------------------------------------------------------- the pass

    def _decide(self, step: int) -> DecidedStep:
        started = self.started.items
        decided = DecidedStep(step)
        budget = self.config.max_prefill_length - decode_set.count_eligible(started)
        prefills = True
        at = 0
        while at < len(started):  # a retraction takes requests off its end
            request = started[at]
            at += 1
            if request.is_prefilling:
                if prefills:
                    used = self._prefill(request, decided, budget)
                    budget -= used
                    prefills = used > 0
            elif decode_set.is_eligible(request) and self._get_decode_page(request, decided):
                decode_set.schedule_row(request, step)
                decided.decode_rows.append(request)
        if prefills and not decided.num_retracted:
            self._admit(decided, budget)
        decided.prefill_rows.sort(key=lambda row: row.request.order)
        decided.freed = self.slots.take_freed()
        self.ratio.after_step(decided.num_retracted)
        return decided

    def _get_decode_page(self, request: Request, decided: DecidedStep) -> bool:
        """Give the row the page that its next token needs, if it needs one: a free one, else an evicted one, else
        one of the last request started, which is retracted. False if that would be the row itself: it waits."""
        if not decode_set.needs_page(request, self.tree.page_size):
            return True
        while self.tree.num_available == 0:
            if not self._retract_for(request, decided):
                return False
        request.pages += self.tree.take(1)
        return True

    def _retract_for(self, request: Request, decided: DecidedStep) -> bool:
        victim = retraction.pick_victim(self.started, request)
        if victim is None:
            return False
        self._retract(victim)
        decided.num_retracted += 1
        return True

    def _prefill(self, request: Request, decided: DecidedStep, budget: int) -> int:
        """The next chunk of a started request; the number of its tokens, 0 if it gets nothing. Where pages lack
        altogether, the last request started is retracted, and the chunk is matched and sized again."""
        while True:
            chunk = self._size_chunk(request, decided, budget)
            if chunk.num_tokens:
                self._take_chunk(request, chunk, decided)
                return chunk.num_tokens
            if not (chunk.lacks_pages and self._retract_for(request, decided)):
                return 0

    def _size_chunk(self, request: Request, decided: DecidedStep, budget: int) -> admission.Chunk:
        """The first prefill of a step has at least a page, whatever the budget. Of the page-table entries of a step,
        one per row is kept for decode rows."""
        if not decided.prefill_rows:
            budget = max(budget, self.limits.page_size)
        room = self.limits.max_page_changes - self.limits.max_rows - decided.num_prefill_page_changes
        return admission.size_chunk(request, self.tree, budget, room)

    def _take_chunk(self, request: Request, chunk: admission.Chunk, decided: DecidedStep) -> None:
        first_column = len(request.pages)
        admission.apply_chunk(request, chunk, self.tree)
        samples = request.kv_len == request.prefill_len
        request.num_pending += samples
        request.last_step = decided.step
        decided.prefill_rows.append(PrefillRow(request, chunk.num_tokens, first_column, samples))
        decided.num_prefill_page_changes += chunk.num_page_changes

    def _admit(self, decided: DecidedStep, budget: int) -> None:
        """Start waiting requests in order, to the first that gets nothing: no slot, no budget, no pages, or more than
        the estimate allows. With nothing started the first in line may start whatever the estimate says."""
        needed: int | None = None
        size = self.tree.page_size
        while self.waiting.items and self.slots.num_free and (budget > 0 or not decided.prefill_rows):
            request = self.waiting.first
            chunk = self._size_chunk(request, decided, budget)
            if not chunk.num_tokens:
                return
            if needed is None:
                needed = admission.needed_pages(self.started, self.ratio, size)
            if self.started.items and not admission.fits(request, chunk.match, needed, self.ratio, self.tree):
                return
            self._start(request, chunk, decided)
            budget -= chunk.num_tokens
            needed += admission.needed_pages((request,), self.ratio, size)

    def _start(self, request: Request, chunk: admission.Chunk, decided: DecidedStep) -> None:
        self.waiting.remove(request)
        request.state = State.STARTED
        request.slot = self.slots.assign()
        request.prefill_len = len(request.tokens)
        request.num_admissions += 1
        cached_len = len(chunk.match.pages) * self.tree.page_size
        if request.num_admissions == 1:
            self.num_prompt_tokens += request.prefill_len
            self.num_cached_tokens += cached_len
        decided.assigned.append((request, cached_len))
        self._take_chunk(request, chunk, decided)
        self.started.add(request)

    def _write(self, decided: DecidedStep) -> StepPlan:
        ring = self._buffers.ring
        index = decided.step % len(ring)
        plan = write_step(decided, ring[index], self.limits, self.config.graph_sizes)
        plan.ring_index = index
        plan.num_free_pages = self.tree.pool.num_free
        plan.num_evictable_pages = self.tree.num_evictable
        self.in_flight.append(InFlight(decided.step, decided.rows(), decided.sample_rows()))
        return plan

    # ----------------------------------------------------------------------------------------------------- errors

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise ControlPlaneError(f"the scheduler is dead: {self._dead}")

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """Whatever goes wrong in here leaves the state half changed: the object is dead from then on, and the caller
        learns it as the one error that it can act on. (The Rust side catches panics at the same place.)"""
        try:
            yield
        except ControlPlaneError as error:
            self._dead = f"{call}: {error}"
            raise
        except Exception as error:
            self._dead = f"{call}: {error!r}"
            raise ControlPlaneError(self._dead) from error
