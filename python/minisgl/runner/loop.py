"""The step loop: it schedules a step, launches it on the engine, and processes the output of the step before.

Invariants: plans are launched in the order they were scheduled; every schedule gets exactly one commit, or the
`ForwardFailed` that stands in for it; step n + 1 is scheduled and launched before step n is waited for (overlap depth
one); every accepted request gets exactly one terminal reply; no message can stop the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minisgl.engine.api import Engine, EngineStepError, SlotAssignment, StepHandle, StepResult
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.message import (
    GRAMMAR_REFUSED,
    AbortRequest,
    AddPrefix,
    AddRequest,
    ClearCache,
    FinishRequest,
    FromEngine,
    RemovePrefix,
    Shutdown,
    ToEngine,
    Watch,
)
from minisgl.message.heartbeat import Activity
from minisgl.metrics.steps import StepTimers
from minisgl.runner.adapters import EngineAdapters
from minisgl.runner.prefixes import Prefixes
from minisgl.runner.request_tracker import (
    Compiling,
    RequestTracker,
    TrackedRequest,
    UncommittedStep,
    ended,
    ends_of,
    errors_of,
    failed_rows,
    reply,
    take_tokens,
)
from minisgl.runner.step_time import StepTime
from minisgl.runner.watching import Watching
from minisgl.sampling_params import ParamError
from minisgl.scheduler.api import AGE, ControlPlane, ControlPlaneError, metadata_time_ns
from minisgl.step import (
    Abort,
    Arrival,
    Event,
    EventError,
    Events,
    Finish,
    FinishReason,
    ForwardFailed,
    RingEntry,
    StepOutput,
    StepPlan,
)

OWN_NAMESPACES = 1 << 30  # of the prefix cache, from here on; below are those of adapters
Send = Callable[[Sequence[FromEngine]], None]


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    plan: StepPlan
    handle: StepHandle


class StepLoop:
    """Drive `control_plane` and `engine`, one step per `step` call; messages for clients go to `send`."""

    def __init__(
        self,
        control_plane: ControlPlane,
        engine: Engine,
        send: Send,
        *,
        overlap: bool = True,
        activity: Activity | None = None,
        fallback: Callable[[], ControlPlane] | None = None,
        timers: StepTimers | None = None,
        keeps_prefixes: bool = True,
        has_budget: bool = False,
        compiler: GrammarCompiler | None = None,
        wake: Callable[[], None] | None = None,
        own_cache_keys: Collection[int] = (),
        step_time: StepTime | None = None,
    ) -> None:
        self._control_plane = control_plane
        self._engine = engine
        self._send = send
        self._overlap = overlap
        self._activity = activity or Activity()
        self.timers = timers or StepTimers()
        self._requests = RequestTracker()
        self.prefixes = Prefixes(self._requests, control_plane.buffers.limits, send, keeps=keeps_prefixes)
        self._own_cache_keys = frozenset(own_cache_keys)
        self._namespaces: dict[tuple[int, int], int] = {}  # of these keys, by key and adapter
        self._fallback = fallback
        self._next_step = 0
        self._in_flight: _InFlight | None = None
        self._failed_step: int | None = None
        self._failure_text = ""
        self._row_errors: dict[int, str] = {}  # why requests of the output that is being sent cannot go on
        self._owners: dict[int, int] = {}  # the request that each slot was last assigned to
        self._ending: dict[int, FinishReason] = {}  # asked to end by an event, and not reported yet
        self._failed_ids: set[int] = set()  # with a row in the failed step
        self._replay: list[Event] = []  # for the next schedule
        self._step_time = step_time  # None: a step may take any time
        self._new_budget = self._budget()  # for the next schedule, which need not be soon
        self._compiling = Compiling(compiler)
        in_use = lambda: self._requests.adapters() | self._compiling.adapters()  # noqa: E731
        self.adapters = EngineAdapters(engine, send, self._end_early, in_use, wake)
        self._has_budget = has_budget
        self._left_something = False  # in the cache, by the last output: the next step sees to the budget
        self.num_failovers = 0
        self.failover_reason = ""
        self._num_arrivals = 0  # at the scheduler
        self._new_ids: list[int] = []
        self._new_cached_lens: list[int] = []
        self._watching: Watching | None = None  # while somebody looks
        self.shutdown = False

    @property
    def control_plane(self) -> ControlPlane:
        return self._control_plane

    @property
    def num_steps(self) -> int:
        return self._next_step

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits: a step would change nothing."""
        return self.rests and not self._compiling

    @property
    def rests(self) -> bool:
        """A step would change nothing until a message comes, or a grammar is compiled."""
        if self._in_flight is not None or self._failed_step is not None or self._replay or self.prefixes.events:
            return False
        if self._left_something or self.adapters.any_leaves or self._compiling.any_returns:
            return False
        return self._control_plane.stats().num_live == 0

    def wait_for_grammar(self) -> None:
        """If nothing else is to be done, until one is compiled: for those who wait for no messages."""
        if self._compiling and self.rests:
            self._compiling.wait()

    def step(self, messages: Sequence[ToEngine]) -> None:
        """Take in `messages`, schedule and launch one step, commit the one before (without overlap: this one).

        Raises `ControlPlaneError` if there is no other scheduler to go on with, or what a dead engine raises; both
        end the loop.
        """
        timers = self.timers
        self._left_something = False
        plan = self._schedule(self._intake(messages))
        timers.lap(timers.schedule, plan.step)
        if metadata_ns := metadata_time_ns(self._control_plane):
            timers.metadata.add(metadata_ns)
        previous = self._in_flight
        self._in_flight = _InFlight(plan, self._launch(plan))
        timers.lap(timers.launch, plan.step)
        timers.scheduled(plan.num_rows, plan.num_tokens)
        if previous is not None and not self._process_output(previous):
            return
        if not self._overlap or plan.num_rows == 0:
            self._process_last()

    def drain(self) -> None:
        """Commit the step in flight, if any."""
        if self._in_flight is not None:
            self._process_last()

    # ------------------------------------------------------------------------------------------------- into a step

    def _intake(self, messages: Sequence[ToEngine]) -> Events:
        events, failed = Events(), self._failed_step is not None
        if self._failed_step is not None:
            events.add(ForwardFailed(self._failed_step))
            self._failed_step = None
        if self._new_budget:
            events.items += self._new_budget
            self._new_budget = []
        if self._replay or self.prefixes.events:
            events.items += self._replay + self.prefixes.events
            self._replay, self.prefixes.events = [], []
        for request, matcher, error in self._compiling.take():
            if isinstance(request, TrackedRequest):
                events.add(self._return(request))
            elif matcher is None:
                self._refuse(request.req_id, f"{GRAMMAR_REFUSED}{error}")
            else:
                events.add(self._arrival(request, matcher))
        for message in self.adapters.intake(messages):
            match message:
                case AddRequest() if error := _error_of(message, self._engine.info.vocab_size):
                    self._refuse(message.req_id, error)
                case AddRequest() if message.sampling.grammar is not None:
                    if error := self._compiling.add(message):
                        self._refuse(message.req_id, f"{GRAMMAR_REFUSED}{error}")
                case AddRequest():
                    events.add(self._arrival(message))
                case AbortRequest(req_id):
                    self._end(events, Abort(req_id), FinishReason.ABORT)
                case FinishRequest(req_id):
                    self._end(events, Finish(req_id), FinishReason.STOP)
                case AddPrefix() | RemovePrefix() | ClearCache():
                    for event in self.prefixes.take(message, self._control_plane.stats().num_evictable_pages):
                        events.add(event)
                        if isinstance(event, Abort):
                            self._ending.setdefault(event.req_id, FinishReason.ABORT)
                case Watch(steps, tree):
                    self._watching = self._watching or Watching(self._send, self.timers, self._owners)
                    self._watching.renew(steps=steps, tree=tree)
                case Shutdown():
                    self.shutdown = True
        if failed:
            self.prefixes.lost()  # for the next step: until this one the old pins are there
        return events

    def _budget(self) -> list[Event]:
        return [] if self._step_time is None else [self._step_time.budget]

    def _end(self, events: Events, event: Abort | Finish, reason: FinishReason) -> None:
        """A client asks for it."""
        if self._compiling.drop(event.req_id):
            if event.req_id in self._requests:
                self._requests.drop(event.req_id)
            self._end_early(event.req_id, reason)
            return
        events.add(event)
        self._ending.setdefault(event.req_id, reason)

    def _arrival(self, message: AddRequest, grammar: Matcher | None = None) -> Arrival:
        if message.req_id in self._requests:
            raise ValueError(f"request id {message.req_id} was used twice")
        tokens = np.frombuffer(message.tokens, np.int32)
        num_prompt = len(tokens) - message.num_generated
        request = self._requests.add(message.req_id, message.sampling, tokens, num_prompt, message.priority)
        if message.key in self._own_cache_keys:
            own = (message.key, message.sampling.adapter)
            request.namespace = self._namespaces.setdefault(own, OWN_NAMESPACES + len(self._namespaces))
        request.grammar = grammar
        request.number = self._num_arrivals
        self._num_arrivals += 1
        return request.arrival()

    def _return(self, request: TrackedRequest) -> Arrival:
        """Of one that waited outside for a mask. It does not stand behind those that came since it did."""
        arrival = self._requests.get(request.req_id).arrival()
        steps = -(-(self._num_arrivals - request.number) // AGE)
        self._num_arrivals += 1
        return replace(arrival, priority=max(arrival.priority - steps, -(2**31) + 1))

    def _schedule(self, events: Events) -> StepPlan:
        """Schedule; a request that the scheduler refuses gets an error, and the other events are sent again."""
        while True:
            try:
                plan = self._control_plane.schedule(self._next_step, events)
            except EventError as error:
                event = events.items.pop(error.index)
                if not isinstance(event, Arrival):
                    raise
                self._requests.drop(event.req_id)
                self._ending.pop(event.req_id, None)
                if event.req_id < 0:
                    self.prefixes.refuse(event.req_id, error.field, error.reason)
                else:
                    self._refuse(event.req_id, f"{error.field}: {error.reason}")
            except ControlPlaneError as error:
                self._fail_over(error)
                events, self._replay = Events(self._replay), []
            else:
                self._next_step += 1
                self._failed_ids.clear()
                return plan

    def _launch(self, plan: StepPlan) -> StepHandle:
        assignments = self._assignments(plan) if plan.num_assigned else ()
        return self._engine.launch(plan, self._control_plane.buffers, assignments)

    def _assignments(self, plan: StepPlan) -> list[SlotAssignment]:
        entry = self._control_plane.buffers.ring[plan.ring_index]
        assignments = []
        for i in range(plan.num_assigned):
            slot, cached_len = entry.assigned[i].tolist()
            req_id = int(entry.assigned_ids[i])
            request = self._requests.get(req_id)
            self._owners[slot] = req_id
            if not request.admitted:
                request.admitted = True
                if req_id >= 0:
                    self.prefixes.admitted(request, cached_len)
                    self._new_ids.append(req_id)
                    self._new_cached_lens.append(cached_len)
            assignments.append(request.assignment(slot))
        return assignments

    # ----------------------------------------------------------------------------------------------- out of a step

    def _process_last(self) -> None:
        last, self._in_flight = self._in_flight, None
        assert last is not None
        self._process_output(last)

    def _process_output(self, step: _InFlight) -> bool:
        """Wait for `step`, commit it and send what it gave. False if its forward failed."""
        timers, number = self.timers, step.plan.step
        self._activity.enter("forward", number)
        timers.rest()
        try:
            result = step.handle.wait()
        except EngineStepError as error:
            self._forward_failed(step.plan, error)
            return False
        finally:
            timers.awake(timers.wait, number)
            self._activity.enter("working")
        try:
            output = self._control_plane.commit(number, result.tokens)
        except ControlPlaneError as error:
            self._fail_over(error, UncommittedStep(step.plan, self._entry(step.plan), result))
            return False
        timers.lap(timers.commit, number)
        self._report(output, result)
        timers.lap(timers.send, number)
        if self._step_time is not None:
            began, ended = step.handle.span()
            if self._step_time.measured(step.plan, ended - began):
                self._new_budget = self._budget()
        if self._watching is not None and not self._watching.committed(step.plan, output, self._control_plane):
            self._watching = None
        if timers.trace is not None and step.plan.num_rows:
            timers.trace.forward(step.handle.span(), number)
        return True

    def _report(self, output: StepOutput, result: StepResult) -> None:
        if result.failures:
            output, self._row_errors, late = failed_rows(output, result.failures)
            for req_id in late:
                self._compiling.hold(self._requests.get(req_id))
        self._reply(self.prefixes.of_clients(output) if self.prefixes.computed else output, result)
        self._requests.record(output)
        if self._has_budget and len(output):
            self._left_something = True
        if self._ending:
            for req_id in output.req_ids[output.reasons != FinishReason.NONE].tolist():
                self._ending.pop(req_id, None)

    def _entry(self, plan: StepPlan) -> RingEntry:
        return self._control_plane.buffers.ring[plan.ring_index]

    def _forward_failed(self, plan: StepPlan, error: EngineStepError) -> None:
        """Drop the step in flight behind the failed one: it read what that one should have written."""
        step = self._failed_step = plan.step
        slots = self._entry(plan).req_slots[: plan.num_rows].tolist()
        self._failed_ids = {self._owners[slot] for slot in slots}
        self._failure_text = f"the forward of step {step} failed: {error}"
        if self._in_flight is not None:
            later, self._in_flight = self._in_flight, None
            self._activity.enter("forward", later.plan.step)
            with contextlib.suppress(EngineStepError):  # the same event stands in for it
                later.handle.wait()

    # ---------------------------------------------------------------------------------------------------- failover

    def _fail_over(self, error: ControlPlaneError, *uncommitted: UncommittedStep) -> None:
        """The scheduler broke: process the steps in flight without it, and go on with another one, whose first call
        gets what lives. (Events of the failed call need not be sent again: its arrivals are tracked, its ends are
        reported here.)"""
        if self._fallback is None:
            raise error
        self.num_failovers += 1
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
        self._ending.update(dict.fromkeys(self._failed_ids, FinishReason.ERROR))  # the event of it is lost, too
        self._failed_ids.clear()
        left = ends_of(self._ending, self._requests, self._next_step)
        self._report(left, StepResult(np.empty(0, np.int32)))
        self._ending.clear()
        self._requests.flush()
        self._failed_step = None
        self._control_plane, self._fallback = self._fallback(), None
        self.prefixes.lost()
        self.prefixes.events.clear()  # they are live as the others
        live = (one.arrival() for one in self._requests.live() if one.req_id not in self._compiling)
        self._replay = [*self._budget(), *live]

    def _wait_for(self, step: _InFlight) -> StepResult | None:
        self._activity.enter("forward", step.plan.step)
        try:
            return step.handle.wait()
        except EngineStepError as error:
            self._failure_text = f"the forward of step {step.plan.step} failed: {error}"
            return None
        finally:
            self._activity.enter("working")

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

    def _refuse(self, req_id: int, reason: str) -> None:
        self._end_early(req_id, FinishReason.ERROR, reason)

    def _end_early(self, req_id: int, reason: FinishReason, text: str = "") -> None:
        """Ends a request of which the scheduler has not heard."""
        self._send([ended(self._next_step, req_id, reason, text)])


def _error_of(message: AddRequest, vocab_size: int) -> str:
    """Why a request cannot be taken; empty if it can."""
    sampling = message.sampling
    if sampling.max_tokens is None or sampling.seed is None:
        return "sampling: max_tokens and seed must be resolved before the engine sees them"
    try:
        sampling.check()
    except ParamError as error:
        return str(error)
    if len(message.tokens) % 4:
        return f"tokens: {len(message.tokens)} bytes: no multiple of 4"
    if not -(2**63) <= message.priority < 2**63:
        return "priority: more than 64 bits"
    tokens = np.frombuffer(message.tokens, np.int32)
    if not 0 <= message.num_generated < min(len(tokens), sampling.max_tokens):
        return f"num_generated: {message.num_generated}: must leave a prompt and a token to make"
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"tokens: ids must be at least 0 and below {vocab_size}"
    if found := sampling.beyond(vocab_size):
        return f"{found[0]}: token ids must be below {vocab_size} (got {found[1]})"
    return ""
