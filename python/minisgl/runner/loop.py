"""The step loop: it schedules a step, launches it on the engine, and processes the output of the previous step.

Invariants: plans are launched in the order they were scheduled; every schedule gets exactly one commit, or the
`ForwardFailed` in place of it; step n + 1 is scheduled and launched before step n is waited for (overlap depth one);
every accepted request gets exactly one final reply; no message can stop the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.engine.api import Engine, EngineStepError, SlotAssignment, StepHandle, StepResult
from minisgl.message import ToEngine
from minisgl.message.heartbeat import Activity
from minisgl.metrics.steps import StepTimers
from minisgl.runner.drafting import DraftGate, DraftRequest
from minisgl.runner.intake import Beside, Intake, LoopSettings, Send
from minisgl.runner.request_tracker import (
    UncommittedStep,
    ends_of,
    errors_of,
    failed_rows,
    reply,
    take_tokens,
)
from minisgl.runner.step_time import StepTime
from minisgl.runner.watching import Recent, Watching
from minisgl.scheduler.api import ControlPlane, ControlPlaneError, backend_of, metadata_time_ns, part_failures
from minisgl.step import (
    Arrival,
    Event,
    EventError,
    Events,
    FinishReason,
    ForwardFailed,
    RingEntry,
    StepOutput,
    StepPlan,
)

FREED_WITHIN = 3
"""Steps after which a retracted request's slot is free, because no step in flight holds a row of it."""
CLEAR_STEPS = 64
"""Low-priority steps after the last ordinary request that run without overlap."""
DEFAULTS = LoopSettings()
NO_HELPERS = Beside()

Failover = tuple[str, str, str]
"""(scheduler name, failed part, error type)"""


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    plan: StepPlan
    handle: StepHandle


@dataclass(slots=True)
class Timing:
    """Heartbeat activity, timers and the optional step-time controller of a step loop."""

    activity: Activity = field(default_factory=Activity)
    timers: StepTimers = field(default_factory=StepTimers)
    step_time: StepTime | None = None

    @contextlib.contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Mark the time in which the loop waits for the forward of `step`."""
        self.activity.enter("forward", step)
        try:
            yield
        finally:
            self.activity.enter("working")

    def budget(self) -> list[Event]:
        return [] if self.step_time is None else [self.step_time.budget]

    def computed(self, step: _InFlight) -> list[Event]:
        """Record the step's duration. Returns the new token budget as an event if it has changed."""
        if self.timers.trace is None and self.step_time is None:
            return []
        began, ended = step.handle.span()
        if self.timers.trace is not None and step.plan.num_rows:
            self.timers.trace.forward((began, ended), step.plan.step)
        if self.step_time is None or not self.step_time.measured(step.plan, ended - began):
            return []
        return [self.step_time.budget]


@dataclass(slots=True)
class Admitted:
    """Prompt counters of all requests' first admissions, not counting returns after a late mask or a failover."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_hits: int = 0
    num_misses: int = 0

    def add(self, num_tokens: int, cached_len: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += cached_len
        self.num_hits += cached_len > 0
        self.num_misses += cached_len == 0


class StepLoop:
    """Drives `control_plane` and `engine`, one step per call of `step`. Messages for clients go to `send`. `fallback`
    creates the scheduler that takes over when `control_plane` breaks; `None`: the error ends the loop."""

    def __init__(
        self,
        control_plane: ControlPlane,
        engine: Engine,
        send: Send,
        settings: LoopSettings = DEFAULTS,
        *,
        timing: Timing | None = None,
        beside: Beside = NO_HELPERS,
        fallback: Callable[[], ControlPlane] | None = None,
    ) -> None:
        self._control_plane = control_plane
        self._engine = engine
        self._send = send
        self._settings = settings
        self._timing = timing or Timing()
        self.timers = self._timing.timers
        self._intake = Intake(engine, control_plane, send, settings, beside)
        self._requests = self._intake.requests
        self._ending = self._intake.ending
        self.prefixes, self.adapters = self._intake.prefixes, self._intake.adapters
        self._fallback = fallback
        self.guesses = beside.guesses
        self._trust = DraftGate(0 if self.guesses is None else self.guesses.min_right)
        self._in_flight: _InFlight | None = None
        self._failed_step: int | None = None
        self._failure_text = ""
        self._row_errors: dict[int, str] = {}  # errors of requests in the output being sent
        self._owners: dict[int, int] = {}  # last request id of each slot
        self._failed_ids: set[int] = set()  # requests with a row in the failed step
        self._replay: list[Event] = []  # events for the next schedule
        self._last_sent_back = -FREED_WITHIN  # last step that retracted a request
        self._new_budget = self._timing.budget()  # budget event for the next schedule
        self._last_others = -CLEAR_STEPS  # last step with ordinary requests
        self._has_unused_pages = False  # by the last output: the next step applies the cache budget
        self._failovers: list[Failover] = []
        self._has_parts = hasattr(control_plane, "part_failures")  # avoids a lookup per step
        self.failover_reason = ""
        self.admitted = Admitted()
        self._new_ids: list[int] = []
        self._new_cached_lens: list[int] = []
        self._watching: Watching | None = None  # None: no one watches
        self._recent = Recent(self.timers, self._owners)

    @property
    def control_plane(self) -> ControlPlane:
        return self._control_plane

    @property
    def num_steps(self) -> int:
        return self._intake.step

    @property
    def shutdown(self) -> bool:
        """Whether a front end has requested the shutdown."""
        return self._intake.shutdown

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing waits, so that a step would change nothing."""
        intake = self._intake
        return self.is_resting and not (intake.compiling or intake.seeing or intake.reading)

    @property
    def is_resting(self) -> bool:
        """Whether a step would change nothing until a message arrives, a grammar is compiled, a slice of an image is
        computed or pages are read."""
        if self._in_flight is not None or self._failed_step is not None or self._replay:
            return False
        if self._has_unused_pages or self._intake.has_events:
            return False
        return self._control_plane.stats().num_live == 0

    def wait_for_grammar(self) -> None:
        """Block until a grammar is compiled, if there is nothing else to do. For callers without incoming messages."""
        if self._intake.compiling and self.is_resting:
            self._intake.compiling.wait()

    def close(self) -> None:
        """Stop the threads that read adapters and pages."""
        self.adapters.close()
        self._intake.reading.close()

    def step(self, messages: Sequence[ToEngine]) -> None:
        """Handle `messages`, schedule and launch one step, and commit the previous one (without overlap: this one).
        Raises `ControlPlaneError` if the scheduler broke for good, or the error of a dead engine; both end the loop."""
        timers = self.timers
        drafts, self._has_unused_pages = self._propose_drafts(), False
        plan = self._schedule(self._events(messages, drafts))
        timers.lap(timers.schedule, plan.step)
        if metadata_ns := metadata_time_ns(self._control_plane):
            timers.metadata.add(metadata_ns)
        previous = self._in_flight
        self._in_flight = _InFlight(plan, self._launch(plan))
        timers.lap(timers.launch, plan.step)
        timers.scheduled(plan.num_rows, plan.num_tokens)
        if previous is not None and not self._process_output(previous):
            return
        if not self._settings.overlap or plan.num_rows == 0 or self._should_skip_overlap(plan):
            self._process_last()

    def _should_skip_overlap(self, plan: StepPlan) -> bool:
        """Return whether no step may be scheduled while this one runs: it has low-priority requests only, and there
        were others lately. A new request of those then waits for the end of this step only."""
        if plan.num_background < plan.num_tokens:
            self._last_others = plan.step
            return False
        return plan.step - self._last_others < CLEAR_STEPS

    def drain(self) -> None:
        """Commit the step in flight, if any."""
        if self._in_flight is not None:
            self._process_last()

    # ------------------------------------------------------------------------------------------------- into a step

    def _events(self, messages: Sequence[ToEngine], drafts: Sequence[Event]) -> Events:
        events, failed = Events(), self._failed_step is not None
        if self._failed_step is not None:
            events.add(ForwardFailed(self._failed_step))
            self._failed_step = None
        events.items += [*self._new_budget, *self._replay, *drafts]
        self._new_budget, self._replay = [], []
        self._intake.take(messages, events, self._control_plane)
        if (watch := self._intake.watch) is not None:
            self._intake.watch = None
            self._watching = self._watching or Watching(self._send, self.timers, self._owners, self._recent.steps)
            self._watching.renew(steps=watch.steps, tree=watch.tree)
        if failed:
            self.prefixes.lost()  # after this step, which still has the old pins
        return events

    def _propose_drafts(self) -> list[Event]:
        """Return drafts for the sequences that can use them. The draft model runs while no step is in flight: two
        forwards at once would slow each other down, and all sequences are drafted in the same forwards."""
        if self.guesses is None or self._failed_step is not None or not self._control_plane.drafts_wanted():
            return []
        if not self._trust.should_propose():
            return []
        self.drain()
        wanted = self._control_plane.drafts_wanted() if self._failed_step is None else []
        if not wanted:
            return []
        requests = [(self._requests.get(req_id), count) for req_id, count in wanted]
        self.timers.rest()
        with self._timing.forward(self._intake.step):
            draft_requests = [
                DraftRequest(request.req_id, request.tokens, count, request.namespace) for request, count in requests
            ]
            self._trust.record_results(draft_requests)
            drafts = self.guesses.propose(draft_requests)
            self._trust.remember(drafts)
        self.timers.awake(self.timers.wait)
        return list(drafts)

    def _schedule(self, events: Events) -> StepPlan:
        """Schedule a step. A request that the scheduler refuses gets an error, and the call is repeated without it."""
        while True:
            try:
                plan = self._control_plane.schedule(self._intake.step, events)
            except EventError as error:
                event = events.items.pop(error.index)
                if not isinstance(event, Arrival):
                    raise
                self._intake.forget(event.req_id, error.field, error.reason)
            except ControlPlaneError as error:
                self._fail_over(error)
                events, self._replay = Events(self._replay), []
            else:
                self._intake.step += 1
                self._failed_ids.clear()
                return plan

    def _launch(self, plan: StepPlan) -> StepHandle:
        if self._intake.prepares:
            self._prepare_again(plan)
        assignments = self._assignments(plan) if plan.num_assigned else ()
        return self._engine.launch(plan, self._control_plane.buffers, assignments)

    def _assignments(self, plan: StepPlan) -> list[SlotAssignment]:
        entry = self._control_plane.buffers.ring[plan.ring_index]
        assignments = []
        loading = set(entry.page_loads[: plan.num_page_loads, 0].tolist()) if plan.num_page_loads else ()
        for i in range(plan.num_assigned):
            slot, cached_len = entry.assigned[i].tolist()
            req_id = int(entry.assigned_ids[i])
            request = self._requests.get(req_id)
            self._owners[slot] = req_id
            self._intake.started(req_id)
            if not request.admitted:
                request.admitted = True
                if slot in loading:  # further pages are loaded by the next chunks
                    cached_len = max(cached_len, request.stored_len(self._control_plane.buffers.limits.page_size))
                self.admitted.add(len(request.tokens), cached_len)
                if req_id >= 0:
                    self.prefixes.admitted(request, cached_len)
                    self._new_ids.append(req_id)
                    self._new_cached_lens.append(cached_len)
            assignments.append(request.assignment(slot))
        return assignments

    def _prepare_again(self, plan: StepPlan) -> None:
        """Start reading stored pages and computing images of retracted requests. They are found by their slots, which
        are free once no step in flight has a row of them."""
        if plan.num_retracted:
            self._last_sent_back = plan.step
        if plan.step - self._last_sent_back >= FREED_WITHIN or not plan.num_freed:
            return
        self._requests.flush()
        for slot in self._entry(plan).freed[: plan.num_freed].tolist():
            request = self._requests.peek(self._owners[slot])
            if request is not None and request.req_id not in self._intake.compiling:
                self._intake.sent_back(request, self._control_plane)

    # ----------------------------------------------------------------------------------------------- out of a step

    def _process_last(self) -> None:
        last, self._in_flight = self._in_flight, None
        assert last is not None
        self._process_output(last)

    def _process_output(self, step: _InFlight) -> bool:
        """Wait for `step`, commit it and send its output. Returns False if its forward or its commit failed."""
        timers, number = self.timers, step.plan.step
        self._timing.activity.enter("forward", number)  # inlined `forward`, which costs a microsecond more
        timers.rest()
        try:
            result = step.handle.wait()
        except EngineStepError as error:
            self._forward_failed(step.plan, error)
            return False
        finally:
            timers.awake(timers.wait, number)
            self._timing.activity.enter("working")
        try:
            output = self._control_plane.commit(number, result.tokens)
        except ControlPlaneError as error:
            self._fail_over(error, UncommittedStep(step.plan, self._entry(step.plan), result))
            return False
        timers.lap(timers.commit, number)
        self._report(output, result)
        timers.lap(timers.send, number)
        self._new_budget = self._timing.computed(step) or self._new_budget
        if self._watching is None:
            self._recent.committed(step.plan, output, self._control_plane)
        elif not self._watching.committed(step.plan, output, self._control_plane):
            self._watching = None
        return True

    def _report(self, output: StepOutput, result: StepResult) -> None:
        if result.failures:
            output, self._row_errors, late = failed_rows(output, result.failures)
            for req_id in late:
                self._intake.compiling.hold(self._requests.get(req_id))
        self._reply(self.prefixes.without_own_rows(output) if self.prefixes.computed else output, result)
        self._requests.record(output)
        if self._settings.has_budget and len(output):
            self._has_unused_pages = True
        if self._ending:
            for req_id in output.req_ids[output.reasons != FinishReason.NONE].tolist():
                self._ending.pop(req_id, None)

    def _entry(self, plan: StepPlan) -> RingEntry:
        return self._control_plane.buffers.ring[plan.ring_index]

    def _forward_failed(self, plan: StepPlan, error: EngineStepError) -> None:
        """Record a failed forward and drop the step in flight after it, which depends on its results."""
        step = self._failed_step = plan.step
        slots = self._entry(plan).req_slots[: plan.num_rows].tolist()
        self._failed_ids = {self._owners[slot] for slot in slots}
        self._failure_text = f"the forward of step {step} failed: {error}"
        if self._in_flight is not None:
            later, self._in_flight = self._in_flight, None
            with self._timing.forward(later.plan.step), contextlib.suppress(EngineStepError):
                later.handle.wait()  # covered by the same `ForwardFailed`

    # ---------------------------------------------------------------------------------------------------- failover

    @property
    def failovers(self) -> list[Failover]:
        """Failovers so far. The part is "scheduler" if the whole scheduler was replaced."""
        backend, failures = backend_of(self._control_plane), part_failures(self._control_plane)
        return [*self._failovers, *((backend, part, why.partition(":")[0]) for part, why in failures.items())]

    @property
    def num_failovers(self) -> int:
        return len(self._failovers) + (len(part_failures(self._control_plane)) if self._has_parts else 0)

    def _fail_over(self, error: ControlPlaneError, *uncommitted: UncommittedStep) -> None:
        """Replace the broken scheduler: process the steps in flight without it, and start the fallback with all live
        requests. (Events of the failed call are not repeated: arrivals are tracked, ends are reported here.)"""
        if self._fallback is None:
            raise error
        backend, kind = backend_of(self._control_plane), type(error.__cause__ or error).__name__
        self._failovers = [*self.failovers, (backend, getattr(error, "part", "scheduler"), kind)]
        self.failover_reason = str(error)
        steps = list(uncommitted)
        if self._in_flight is not None:
            later, self._in_flight = self._in_flight, None
            steps.append(UncommittedStep(later.plan, self._entry(later.plan), self._wait_for(later)))
        limits, eos_ids = self._control_plane.buffers.limits, self._engine.info.eos_ids
        for step in steps:
            output = take_tokens(step, self._owners, self._requests, limits, eos_ids, self._ending)
            self._report(output, step.result or StepResult(np.empty(0, np.int32)))
        self._requests.flush()
        self._ending.update(dict.fromkeys(self._failed_ids, FinishReason.ERROR))  # their `ForwardFailed` is lost, too
        self._failed_ids.clear()
        left = ends_of(self._ending, self._requests, self._intake.step)
        self._report(left, StepResult(np.empty(0, np.int32)))
        self._ending.clear()
        self._requests.flush()
        self._failed_step = None
        self._control_plane, self._fallback = self._fallback(), None
        self._has_parts = hasattr(self._control_plane, "part_failures")
        self.prefixes.lost()
        self.prefixes.events.clear()  # arrivals of all live requests follow
        self._replay = self._timing.budget() + self._intake.arrivals()

    def _wait_for(self, step: _InFlight) -> StepResult | None:
        with self._timing.forward(step.plan.step):
            try:
                return step.handle.wait()
            except EngineStepError as error:
                self._failure_text = f"the forward of step {step.plan.step} failed: {error}"
                return None

    def _reply(self, output: StepOutput, result: StepResult) -> None:
        if not len(output) and not self._new_ids and not result.prompt_logprobs:
            return
        limit = self._control_plane.buffers.limits.max_seq_len
        errors = errors_of(output, self._requests, self._row_errors, self._failure_text, limit)
        message = reply(output, result, self._new_ids, self._new_cached_lens, errors)
        self._new_ids.clear()
        self._new_cached_lens.clear()
        self._row_errors = {}
        self._send([message])
