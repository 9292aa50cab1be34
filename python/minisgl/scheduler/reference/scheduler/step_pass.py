"""The pass that decides a step: first rows for started requests, in order, then admissions.

Invariants: decode rows come first in the token budget; a failed admission changes nothing; nothing is admitted after a
retraction; a low-priority row takes nothing from other requests.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.parts import PlanChunks
from minisgl.scheduler.reference import admission, decode_set, drafts, retraction
from minisgl.scheduler.reference.background import Background
from minisgl.scheduler.reference.metadata import DecidedStep, PrefillRow
from minisgl.scheduler.reference.radix import NO_CHECKPOINT
from minisgl.scheduler.reference.ranking import MAX_LOOK_UPS
from minisgl.scheduler.reference.request import Request, State
from minisgl.scheduler.reference.state import SchedulerState
from minisgl.step import FROM_STORE, UNBOUNDED


class StepPass:
    """Decides the next step, admissions and retractions included, and changes the scheduler's state accordingly."""

    def __init__(self, config: ControlPlaneConfig, state: SchedulerState, plan_chunks: PlanChunks) -> None:
        self.state = state
        self._plan_chunks = plan_chunks
        self.config = config
        self.limits = config.limits()
        self.budgets = (config.max_prefill_length, config.max_prefill_length)  # see `TokenBudget`
        self.background = Background()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_retracted = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_saved = 0
        self.num_cut_short = 0
        self.num_computed_again = 0
        self.num_loaded = 0

    def decide(self, step: int) -> DecidedStep:
        decided = DecidedStep(step)
        budget = self._pass(decided, self._budget(), background=False)
        if self.config.max_draft_len:
            self._add_drafts(decided, budget or 0)
        if budget is not None and not self.state.waiting.num_ordinary and not decided.num_draft_rows:
            self._background_pass(decided, budget)
        decided.prefill_rows.sort(key=lambda row: row.request.order)
        decided.freed = self.state.slots.take_freed()
        self.state.ratio.after_step(decided.num_retracted - decided.num_gave_way)
        self._enforce_cache_budget()
        if self.state.tree.has_states:
            self._save_tails(decided)
            self.state.tree.settle_checkpoints()
        return decided

    def _budget(self) -> int:
        """Return the token budget of this step. A decoding request counts even if it must wait in this step, so that no
        long step comes between two of its tokens; a low-priority one does not count. A step with low-priority requests
        only has the budget of a step with decode rows, because new arrivals wait for its end."""
        ordinary = self.state.started.items[: self.state.started.num_ordinary]
        beside_decode, prefill_only = self.budgets
        prefills = all(request.is_prefilling for request in ordinary) and (ordinary or self.state.waiting.num_ordinary)
        return min(self.config.max_prefill_length, prefill_only if prefills else beside_decode)

    def _background_pass(self, decided: DecidedStep, budget: int) -> None:
        """Add rows of low-priority requests, if there are any, within their token limit."""
        started = self.state.started
        if len(started) == started.num_ordinary and not self.state.waiting.items:
            return
        others = decided.num_tokens
        most = self.background.bound(started.num_ordinary, others if decided.prefill_rows else 0)
        if most > 0:
            self._pass(decided, budget, background=True, most=most)
        decided.num_background = decided.num_tokens - others
        self.background.spend(decided.num_background)

    def _pass(self, decided: DecidedStep, budget: int, background: bool, most: int = UNBOUNDED) -> int | None:
        """Add rows of the low-priority requests, or of the others, up to `most` tokens or the end of a page: first
        those that have started, in order, then new ones. Returns the rest of the budget, or `None` if a prefilling
        request got nothing."""
        started = self.state.started
        at, to = (started.num_ordinary, len(started)) if background else (0, started.num_ordinary)
        num_decode = min(decode_set.count_eligible(started.items[at:to]), most)
        budget = min(budget - num_decode, max(most - num_decode, self.limits.page_size))
        prefills = most > num_decode
        while at < min(to, len(started)):  # a retraction removes requests from the end
            request, at = started.items[at], at + 1
            if request.is_prefilling:
                if prefills:
                    used = self._prefill(request, decided, budget)
                    budget -= used
                    prefills = used > 0
            elif num_decode and decode_set.is_eligible(request) and self._get_decode_page(request, decided):
                num_decode -= 1
                decode_set.schedule_row(request, decided.step)
                decided.decode_rows.append(request)
        if not prefills:
            return None
        if decided.num_retracted == (0 if background else decided.num_gave_way):
            budget = self._admit(decided, budget, background)
        return budget

    def _add_drafts(self, decided: DecidedStep, budget: int) -> None:
        """Add draft rows from what is left of rows, tokens and pages, in request order; low-priority requests are
        retracted for their pages. A draft that gets nothing is dropped, so that its request need not wait."""
        for request in decided.decode_rows:
            left = min(budget - decided.num_draft_rows, self.limits.max_rows - decided.num_rows)
            wanted = max(0, min(drafts.draft_len(request), left))
            count = self._draft_with_pages(request, decided, wanted)
            if count:
                drafts.schedule_draft(request, count, self.state.tree)
                decided.drafting.append(request)
                decided.num_draft_rows += count
            if request.drafter is not None:
                request.drafter.draft = []
        self.num_drafted += decided.num_draft_rows

    def _draft_with_pages(self, request: Request, decided: DecidedStep, num_tokens: int) -> int:
        """Return how many of `num_tokens` draft tokens have pages, after retracting low-priority requests for them."""
        tree = self.state.tree
        while drafts.num_new_pages(request, num_tokens, tree.page_size) > tree.num_available:
            if not self._retract_background(request, decided):
                return (len(request.pages) + tree.num_available) * tree.page_size - request.kv_len
        return num_tokens

    def _enforce_cache_budget(self) -> None:
        """Evict unused cached pages beyond `cache_token_budget`, if that is set."""
        if self.config.cache_token_budget:
            max_pages = self.config.cache_token_budget // self.limits.page_size
            self.state.tree.evict(max(0, self.state.tree.num_evictable - max_pages))

    def _get_decode_page(self, request: Request, decided: DecidedStep) -> bool:
        """Allocate the page for the request's next token, if that begins one: a free or an evicted page, else one of
        the request that started last, which is retracted. Returns False if that is `request` itself: it waits."""
        if not decode_set.needs_page(request, self.state.tree.page_size):
            return True
        while self.state.tree.num_available == 0:
            if not self._retract_for(request, decided):
                return False
        request.pages += self.state.tree.take(1)
        return True

    def _save_tails(self, decided: DecidedStep) -> None:
        """Save the state of decoding requests once a checkpoint interval, in the one slot that each keeps for it."""
        interval, tree = self.config.checkpoint_interval, self.state.tree
        for row, request in enumerate(decided.decode_rows if tree.policy != "naive" else ()):
            if request.kv_len % interval:
                continue
            slot = request.tail if request.tail != NO_CHECKPOINT else tree.take_slot()
            if slot is not None:
                request.tail, request.tail_len, request.tail_step = slot, request.kv_len, decided.step
                decided.tail_saves.append((row, 1, slot))
                self.num_saved += 1

    def _retract_for(self, request: Request, decided: DecidedStep) -> bool:
        victim = retraction.pick_victim(self.state.started, request)
        if victim is None:
            return False
        self._retract(victim, decided)
        return True

    def _retract_background(self, to: Request, decided: DecidedStep) -> bool:
        """Retract the last started low-priority request for `to`. Returns False if there is none, or `to` is one."""
        if to.is_background or not self.state.started.items or not self.state.started.last.is_background:
            return False
        self._retract(self.state.started.last, decided)
        return True

    def _prefill(self, request: Request, decided: DecidedStep, budget: int) -> int:
        """Schedule the next chunk of a started request. Returns its cost in tokens, 0 if it gets nothing. If no page at
        all is available, the request that started last is retracted and the chunk is sized again; low-priority requests
        are retracted even if the chunk would only be shorter."""
        while True:
            chunk = self._size_chunk(request, decided, budget)
            if chunk.lacks_pages and self._retract_background(request, decided):
                continue
            if chunk.num_tokens:
                self._schedule_chunk(request, chunk, decided)
                return chunk.cost
            if not (chunk.lacks_pages and self._retract_for(request, decided)):
                return 0

    def _size_chunk(self, request: Request, decided: DecidedStep, budget: int, needed: int = 0) -> admission.Chunk:
        """Size a chunk of `request`. The first prefill of a step gets at least a page, whatever the budget. Of a step's
        page-table entries, one per row is reserved for decode rows."""
        if not decided.prefill_rows:
            budget = max(budget, self.limits.page_size)
        max_page_changes = self.limits.max_page_changes - self.limits.max_rows - decided.num_prefill_page_changes
        chunk_limits = admission.ChunkLimits(budget, max_page_changes, self.state.ratio.value, needed, decided.step)
        return admission.size_chunk(request, self.state.tree, chunk_limits, self._plan_chunks)

    def _schedule_chunk(self, request: Request, chunk: admission.Chunk, decided: DecidedStep) -> None:
        first_column = len(request.pages)
        begins = self._initial_state(request, chunk)
        tree, pins, interval = self.state.tree, self.state.pins, self.config.checkpoint_interval
        at = admission.apply_chunk(request, chunk, tree)
        pinned = pins.take(request, tree)
        saves = admission.save_states(request, chunk, tree, at, interval, decided.step)
        if pinned:
            pins.hold(request.req_id, tree)
        self.num_saved += len(saves)
        samples = request.kv_len == request.prefill_len
        request.num_pending += samples
        request.last_step = decided.step
        covered = chunk.num_covered * self.limits.page_size
        decided.prefill_rows.append(
            PrefillRow(request, chunk.num_tokens, first_column, samples, covered, begins, saves, chunk.num_loads)
        )
        self.num_loaded += chunk.num_loads
        decided.num_prefill_page_changes += chunk.num_page_changes

    def _initial_state(self, request: Request, chunk: admission.Chunk) -> int | None:
        """Return the checkpoint slot whose state the request continues from, `FROM_STORE` for a stored state,
        `NO_CHECKPOINT` for an empty state, or `None` if it continues with its current state."""
        if chunk.begins_stored:
            return FROM_STORE
        tree, node = self.state.tree, chunk.match.end
        if not tree.has_states or (request.pages and not chunk.match.pages):
            return None
        if not chunk.match.pages:
            return NO_CHECKPOINT
        tree.use_checkpoint(node)
        return tree.checkpoint(node)

    def _admit(self, decided: DecidedStep, budget: int, background: bool) -> int:
        """Start waiting requests in rank order, up to the first that gets nothing: no slot, budget or pages, or more
        than the estimate allows. Returns the rest of the budget. If no request is started, the next may start whatever
        the estimate says. For ordinary requests, started low-priority ones do not count: if they hold needed slots,
        pages or estimated pages, they are retracted, the last one first. A draining slot is waited for. With a policy
        other than fcfs, small requests may pass one that only lacks memory."""
        state = self.state
        needed: int | None = None
        size = state.tree.page_size
        while self._has_next(background) and (budget > 0 or not decided.prefill_rows):
            if not state.slots.num_free:
                awaits_slot = state.slots.num_draining >= state.waiting.num_ordinary
                if awaits_slot or not self._retract_background(state.waiting.first, decided):
                    break
                continue
            request = state.ranking.next(state.waiting, state.tree, decided.step)
            num_started = len(state.started) if background else state.started.num_ordinary
            if needed is None:
                needed = admission.needed_pages(state.started.items[:num_started], state.ratio, size)
            chunk = self._size_chunk(request, decided, budget, needed)
            if not chunk.num_tokens and not chunk.lacks_pages:
                break
            fits = not num_started or not chunk.num_missing
            if (chunk.lacks_pages or not fits) and self._retract_background(request, decided):
                continue
            if not fits and state.ranking.policy != "fcfs":
                wait = admission.steps_until_free(
                    chunk.num_missing, state.started.items[:num_started], state.ratio, size
                )
                return self._admit_small(request, wait, needed, decided, budget)
            if not chunk.num_tokens or not fits:
                break
            self._start(request, chunk, decided)
            budget -= chunk.cost
            needed += admission.needed_pages((request,), state.ratio, size)
        return budget

    def _admit_small(self, head: Request, wait: int, needed: int, decided: DecidedStep, budget: int) -> int:
        """Start small requests before `head`, which may lack memory for `wait` steps: candidates whose whole prompt
        this step computes, and whose length limit ends them before that. So `head` is not delayed."""
        state, size = self.state, self.state.tree.page_size
        for request in state.ranking.candidates(state.waiting)[:MAX_LOOK_UPS]:
            if request is head or request.num_unscheduled > wait:
                continue
            if budget <= 0 or not state.slots.num_free:
                break
            if needed - (request.cached_len - len(request.tokens)) // size > state.tree.num_available:
                continue  # by the remembered cached length
            chunk = self._size_chunk(request, decided, budget, needed)
            done = (len(chunk.match.pages) + chunk.num_loads) * size + chunk.num_tokens == len(request.tokens)
            if done and not chunk.num_missing:
                self._start(request, chunk, decided)
                budget -= chunk.cost
                needed += admission.needed_pages((request,), state.ratio, size)
        return budget

    def _has_next(self, background: bool) -> bool:
        """Return whether the first waiting request is low-priority (or not), as `background` asks."""
        return bool(self.state.waiting.items) and self.state.waiting.first.is_background == background

    def _start(self, request: Request, chunk: admission.Chunk, decided: DecidedStep) -> None:
        self.state.waiting.remove(request)
        self.state.ranking.last_start = decided.step
        request.state = State.STARTED
        request.slot = self.state.slots.assign()
        request.prefill_len = len(request.tokens)
        request.num_admissions += 1
        found_len = len(chunk.match.pages) * self.state.tree.page_size
        cached_len = found_len + chunk.num_loads * self.state.tree.page_size
        if request.num_found_pages is None:
            request.num_found_pages = chunk.num_found
        if request.num_admissions == 1:
            self.num_prompt_tokens += request.prefill_len
            self.num_cached_tokens += cached_len
            self.num_hits += cached_len > 0
            self.num_misses += cached_len == 0
            self.num_cut_short += chunk.num_found > len(chunk.match.pages)
            self.num_computed_again += chunk.num_found * self.state.tree.page_size - found_len
        decided.assigned.append((request, cached_len))
        self._schedule_chunk(request, chunk, decided)
        self.state.started.add(request)

    # -------------------------------------------------------------------------------------------------- retraction

    def _retract(self, request: Request, decided: DecidedStep) -> None:
        """Retract a request: release its pages and put it back into the waiting queue. A token in flight is still
        committed, and may end it."""
        self.state.started.remove(request)
        self.release_slot(request)
        retraction.give_up_pages(request, self.state.tree)
        self.num_retracted += 1
        decided.num_retracted += 1
        decided.num_gave_way += request.is_background
        request.state = State.WAITING
        self.state.waiting.add(request)

    def release_slot(self, request: Request) -> None:
        is_in_flight = bool(self.state.in_flight) and request.last_step >= self.state.in_flight[0].step
        self.state.slots.free(request.slot, request.last_step if is_in_flight else None)
