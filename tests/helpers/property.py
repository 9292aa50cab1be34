"""Random scenarios for a scheduler, run with the echo engine and judged by whole sequences.

A scenario is a configuration and requests with arrival steps and planned disturbances; `run` drives it through the
Protocols only, checks the invariants after every call, audits the KV of every cached page when nothing is in flight,
and compares each request's tokens with those it generates alone. Any difference is an `AssertionError`.

`Draw` is a function (low, high) -> int, so that the same scenarios come from a seed or from hypothesis, which shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from minisgl.engine.api import EngineStepError, SlotAssignment, StepHandle
from minisgl.engine.echo import EchoEngine, EchoModel
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.step import (
    Abort,
    Arrival,
    ClearCache,
    Draft,
    EventError,
    Events,
    Finish,
    FinishReason,
    ForwardFailed,
    PagesRead,
    RingEntry,
    StepOutput,
    StepPlan,
    TokenBudget,
    Unpin,
)

Draw = Callable[[int, int], int]
EOS = 2
ALPHABET = (0, 1)


class WalkableControlPlane(ControlPlane, Protocol):
    """Scheduler whose prefix cache a test can walk."""

    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]: ...

    def tree_states(self) -> list[tuple[tuple[int, ...], int]]: ...


Factory = Callable[[ControlPlaneConfig], WalkableControlPlane]


@dataclass(slots=True)
class Spec:
    """Request of a scenario with its disturbances. `finish_after`, `abort_after`: delivered tokens; -1: never."""

    req_id: int
    arrival_step: int
    prompt: list[int]
    max_tokens: int
    seed: int
    priority: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    no_match: bool = False
    no_overlap: bool = False
    finish_after: int = -1
    abort_after: int = -1
    background: bool = False
    pin: bool = False
    unpin_step: int = -1
    adapter: int = 0
    stored: tuple[int, int] = (0, 0)  # pages of its prompt, from and to, that need not be computed


@dataclass(frozen=True, slots=True)
class Stored:
    """Stored pages of a token sequence, and the recurrent state after the first `end` of them."""

    tokens: list[int]
    adapter: int
    page_size: int
    end: int

    @property
    def state(self) -> bytes:
        return EchoModel.state(self.adapter, self.tokens[: self.end * self.page_size]).to_bytes(8, "little")

    def page(self, column: int) -> bytes:
        kv = EchoModel.kv(self.tokens, self.adapter)[column * self.page_size : (column + 1) * self.page_size]
        return np.array(kv, np.uint64).T.tobytes()


@dataclass(slots=True)
class Scenario:
    config: ControlPlaneConfig
    overlap: bool
    specs: list[Spec]
    fail_steps: set[int]
    clear_steps: set[int]
    budgets: dict[int, TokenBudget]
    read_steps: set[int]  # steps in which the loaded pages are reported again
    draft_steps: dict[int, tuple[int, int, int]]  # lateness, length and first wrong token of drafts from outside
    broken: dict[int, int]  # adapter -> position from which its outputs are not finite


def draw_from(seed: int) -> Draw:
    return random.Random(seed).randint


def make_scenario(draw: Draw, states: bool = False) -> Scenario:
    page_size = (1, 4, 16)[draw(0, 2)]
    config = ControlPlaneConfig(
        num_pages=draw(8, 64 if page_size == 1 else 24),
        page_size=page_size,
        max_running_requests=draw(1, 6),
        max_prefill_length=(1, 5, 24, 256)[draw(0, 3)],
        context_len=(24, 64, 300)[draw(0, 2)],
        eos_ids=(EOS,),
        cache=("lru", "lru", "lfu", "naive")[draw(0, 3)],  # type: ignore[arg-type]
        graph_sizes=((), (1, 2, 4, 8))[draw(0, 1)],
        cache_token_budget=draw(0, 3) * 20 if draw(0, 3) == 0 else 0,
        cache_max_prompt=draw(1, 30) if draw(0, 3) == 0 else 0,
        schedule_policy=("fcfs", "lpm", "srpf")[draw(0, 2)],  # type: ignore[arg-type]
    )
    config = replace(config, max_pinned_pages=draw(0, config.num_pinnable_pages))
    limit = config.limits().max_seq_len
    specs: list[Spec] = []
    sequences: list[list[int]] = []
    for req_id in range(draw(1, 10)):
        prompt = _prompt(draw, sequences, limit)
        spec = Spec(
            req_id,
            arrival_step=draw(0, 30),
            prompt=prompt,
            max_tokens=draw(1, 40),
            seed=draw(0, 2),
            priority=draw(0, 3) // 3,
            min_tokens=draw(0, 4),
            ignore_eos=draw(0, 3) == 0,
            no_match=draw(0, 7) == 0,
            no_overlap=draw(0, 7) == 0,
            finish_after=draw(0, 12) if draw(0, 4) == 0 else -1,
            abort_after=draw(0, 12) if draw(0, 4) == 0 else -1,
            background=draw(0, 4) == 0,
            pin=draw(0, 2) == 0,
            unpin_step=draw(1, 60) if draw(0, 2) == 0 else -1,
            adapter=draw(0, 2) if draw(0, 2) == 0 else 0,
        )
        specs.append(spec)
        if len(prompt) < limit:
            sequences.append(prompt + alone(spec, limit, states))
    fail_steps = {draw(1, 40)} if draw(0, 5) == 0 else set()
    clear_steps = {draw(1, 60)} if draw(0, 3) == 0 else set()
    config = replace(config, max_draft_len=draw(1, 5) if draw(0, 1) else 0)
    overlap = bool(draw(0, 1))
    if states:
        every, slots = page_size * draw(1, 4), draw(0, 8)
        config = replace(config, max_draft_len=0, checkpoint_interval=every, num_checkpoints=slots)
    background = (1, 700, 2000, 2**40)[draw(0, 3)]
    budgets = {draw(0, 40): TokenBudget(draw(1, 20), draw(1, 40), background) for _ in range(draw(0, 3))}
    broken = {draw(0, 2): draw(0, 30)} if draw(0, 2) == 0 else {}
    for spec in specs if draw(0, 1) else ():
        most = min(len(spec.prompt), broken.get(spec.adapter, limit)) // page_size  # non-finite pages are not stored
        spec.stored = (draw(0, 3) // 3, draw(0, most))
    read_steps = {draw(1, 60) for _ in range(draw(0, 12))}
    draft_steps = {}
    for step in range(draw(0, 1) * 60):
        if draw(0, 2):
            draft_steps[step] = (draw(0, 5) // 5, draw(0, 8), draw(0, 8))
    return Scenario(config, overlap, specs, fail_steps, clear_steps, budgets, read_steps, draft_steps, broken)


def _prompt(draw: Draw, sequences: list[list[int]], limit: int) -> list[int]:
    """Draw a prompt: tokens of a tiny vocabulary, an extension of an earlier sequence, or one too long; some repeat."""
    fresh = [draw(0, 1) for _ in range(draw(1, 24))]
    if sequences and draw(0, 1):
        base = sequences[draw(0, len(sequences) - 1)]
        fresh = base[: draw(1, len(base))] + fresh[: draw(0, 3)]
    if draw(0, 2) == 0:  # a repetition, so that drafts are found
        fresh += fresh[-draw(1, 4) :] * 4
    if draw(0, 15) == 0:
        return [0] * limit
    return fresh[: limit - 1]


def alone(spec: Spec, limit: int, states: bool = False) -> list[int]:
    """Return the tokens that the request generates alone."""
    model = EchoModel(eos_ids=(EOS,), alphabet=ALPHABET, seed=spec.seed, adapter=spec.adapter, states=states)
    return model.generate(
        spec.prompt,
        min(spec.max_tokens, limit - len(spec.prompt)),
        ignore_eos=spec.ignore_eos,
        min_tokens=spec.min_tokens,
    )


@dataclass(slots=True)
class Seen:
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE
    in_failed_step: bool = False


class Driver:
    """Test loop: schedule, launch, commit one step later (or at once), with every check in between."""

    def __init__(self, scenario: Scenario, factory: Factory) -> None:
        self.scenario = scenario
        self.plane = factory(scenario.config)
        limits = scenario.config.limits()
        self.limit = limits.max_seq_len
        self.has_states = scenario.config.checkpoint_interval > 0
        self.engine = EchoEngine(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_rows=limits.max_rows,
            max_seq_len=limits.max_seq_len,
            context_len=scenario.config.context_len,
            vocab_size=3,
            eos_ids=(EOS,),
            alphabet=ALPHABET,
            worker_thread=False,
            checkpoints=scenario.config.num_checkpoints if self.has_states else None,
        )
        self.engine.fail_steps = scenario.fail_steps
        self.engine.broken_adapters = scenario.broken
        self.specs = {spec.req_id: spec for spec in scenario.specs}
        self.seen = {spec.req_id: Seen() for spec in scenario.specs}
        self.cached: dict[int, int] = {}
        self.previous: tuple[StepPlan, StepHandle] | None = None
        self.failed_step: int | None = None
        self.step = 0
        self.slots_in_flight: set[int] = set()
        self.pinned: set[int] = set()  # requests that ended by themselves with a pin

    def run(self) -> None:
        waiting = sorted(self.scenario.specs, key=lambda spec: (spec.arrival_step, spec.req_id))
        while waiting or not self.idle:
            assert self.step < 3000, "the requests do not come to an end"
            due = [spec for spec in waiting if spec.arrival_step <= self.step]
            waiting = waiting[len(due) :]
            self.advance(due)
        self.audit()
        for spec in self.scenario.specs:
            self.judge(spec)
        ends = {self.seen[spec.req_id].reason for spec in self.scenario.specs if spec.pin}
        if ends <= {FinishReason.ABORT, FinishReason.ERROR}:
            assert self.plane.stats().num_pinned_pages == 0, "a pin of a request that did not end by itself"
        self._give_back_pins()
        stats = self.plane.stats()
        assert stats.num_free_pages + stats.num_evictable_pages == self.scenario.config.num_pages, "pages leaked"
        assert stats.num_draining == 0, "slots leaked"
        self.follow_up()

    @property
    def idle(self) -> bool:
        return self.previous is None and self.failed_step is None and self.plane.stats().num_live == 0

    # -------------------------------------------------------------------------------------------------------- step

    def advance(self, arrivals: list[Spec]) -> None:
        nothing_in_flight = self.previous is None
        lives = self.plane.stats().num_live > 0
        plan = self._schedule(self._events(arrivals))
        self.step += 1
        self.plane.check()
        self._inspect(plan)
        handle = self.engine.launch(plan, self.plane.buffers, self._assignments(plan))
        previous, self.previous = self.previous, (plan, handle)
        ended_before = sum(seen.reason != FinishReason.NONE for seen in self.seen.values())
        if previous is not None and not self._commit(*previous):
            return
        if not self.scenario.overlap or plan.num_rows == 0:
            (plan, handle), self.previous = self.previous, None
            if not self._commit(plan, handle):
                return
            if nothing_in_flight and lives and plan.num_rows == 0:
                ended = sum(seen.reason != FinishReason.NONE for seen in self.seen.values())
                assert ended > ended_before, "requests live, nothing is in flight, and the plan has neither row nor end"
            self.audit()

    def _schedule(self, events: Events) -> StepPlan:
        """Schedule the events, retrying without the pins that are refused."""
        try:
            return self.plane.schedule(self.step, events)
        except EventError as error:
            refused = events.items[error.index]
            assert error.field == "pin" and isinstance(refused, Arrival)
            events.items[error.index] = replace(refused, pin=False)
            self.specs[refused.req_id].pin = False
            return self._schedule(events)

    def _give_back_pins(self) -> None:
        for spec in self.specs.values():
            spec.unpin_step = self.step
        while spec.unpin_step == self.step or not self.idle:
            self.advance([])

    def _events(self, arrivals: list[Spec]) -> Events:
        events = Events()
        if self.failed_step is not None:
            events.add(ForwardFailed(self.failed_step))
            self.failed_step = None
            self.pinned.clear()
        for spec in arrivals:
            events.add(
                Arrival(
                    spec.req_id,
                    np.array(spec.prompt, np.int32),
                    num_prompt=len(spec.prompt),
                    max_tokens=spec.max_tokens,
                    min_tokens=spec.min_tokens,
                    ignore_eos=spec.ignore_eos,
                    priority=spec.priority,
                    no_overlap=spec.no_overlap,
                    no_match=spec.no_match,
                    background=spec.background,
                    pin=spec.pin,
                    namespace=spec.adapter,
                    stored_from=spec.stored[0],
                    stored_to=spec.stored[1],
                )
            )
        for req_id, seen in self.seen.items():
            spec = self.specs[req_id]
            if spec.arrival_step <= self.step:
                if 0 <= spec.finish_after <= len(seen.tokens):
                    events.add(Finish(req_id))
                if 0 <= spec.abort_after <= len(seen.tokens):
                    events.add(Abort(req_id))
                if spec.unpin_step == self.step:
                    events.add(Unpin(req_id))
                    self.pinned.discard(req_id)
                    spec.pin = False
        if self.step in self.scenario.clear_steps:
            events.add(ClearCache())
        if self.step in self.scenario.read_steps:
            events.items += [PagesRead(one.req_id, *one.stored) for one in self.scenario.specs]
        events.items += self._drafts()
        if budget := self.scenario.budgets.get(self.step):
            events.add(budget)
        return events

    def _drafts(self) -> list[Draft]:
        """Return drafts of the coming tokens for all running requests, with the errors that the scenario plans."""
        if self.step not in self.scenario.draft_steps:
            return []
        late, count, wrong = self.scenario.draft_steps[self.step]
        drafts = []
        for spec in self.scenario.specs:
            done = len(self.seen[spec.req_id].tokens)
            if done and self.seen[spec.req_id].reason == FinishReason.NONE:
                right = alone(spec, self.limit)[done : done + count]
                tokens = [1 - token if i >= wrong else token for i, token in enumerate(right) if token in ALPHABET]
                drafts.append(Draft(spec.req_id, len(spec.prompt) + done - late, tuple(tokens)))
        return drafts

    def _inspect(self, plan: StepPlan) -> None:
        """Assert that no row passes its limit, and a bound request's cached length is whole pages, less than its
        tokens."""
        entry = self.plane.buffers.ring[plan.ring_index]
        assert (entry.extend_lens[: plan.num_rows] >= 1).all()
        assert (entry.seq_lens[: plan.num_rows] < self.limit).all(), "a row passed the limit"
        slots = set(entry.req_slots[: plan.num_rows].tolist())
        self._inspect_drafts(plan, entry)
        bound = set(entry.assigned[: plan.num_assigned, 0].tolist())
        if self.previous is not None:
            assert not bound & self.slots_in_flight, "a slot is bound while a step in flight holds a row of it"
        self.slots_in_flight = slots
        for (_, cached_len), req_id in zip(
            entry.assigned[: plan.num_assigned].tolist(), entry.assigned_ids[: plan.num_assigned].tolist(), strict=True
        ):
            self.cached.setdefault(req_id, cached_len)
            assert cached_len % self.scenario.config.page_size == 0
            assert cached_len < len(self.specs[req_id].prompt) + len(self.seen[req_id].tokens) + 1

    def _inspect_drafts(self, plan: StepPlan, entry: RingEntry) -> None:
        """Assert that two rows share a slot only if the second computes a known token that may follow the first."""
        lens: dict[int, int] = {}
        rows = zip(entry.req_slots[: plan.num_rows].tolist(), entry.seq_lens[: plan.num_rows].tolist(), strict=True)
        for row, (slot, seq_len) in enumerate(rows):
            if slot in lens:
                assert seq_len == lens[slot] + 1, "two rows share a slot"
                assert row < plan.num_decode_rows and entry.input_ids[row] >= 0
                assert self.scenario.config.max_draft_len
            lens[slot] = seq_len

    def _assignments(self, plan: StepPlan) -> list[SlotAssignment]:
        entry = self.plane.buffers.ring[plan.ring_index]
        assigned = []
        for i in range(plan.num_assigned):
            spec = self.specs[int(entry.assigned_ids[i])]
            tokens = np.array(spec.prompt, np.int32)
            sampling = SamplingParams(seed=spec.seed, adapter=spec.adapter)
            stored = Stored(spec.prompt, spec.adapter, self.scenario.config.page_size, spec.stored[1])
            slot = int(entry.assigned[i, 0])
            assigned.append(SlotAssignment(slot, spec.req_id, sampling, tokens, len(tokens), stored=stored))
        return assigned

    def _commit(self, plan: StepPlan, handle: StepHandle) -> bool:
        try:
            result = handle.wait()
        except EngineStepError:
            self.failed_step = plan.step
            self.previous = None
            return False
        self._take(self.plane.commit(plan.step, result.tokens))
        self.plane.check()
        return True

    def _take(self, output: StepOutput) -> None:
        for req_id, token, reason in zip(
            output.req_ids.tolist(), output.tokens.tolist(), output.reasons.tolist(), strict=True
        ):
            seen = self.seen[req_id]
            assert seen.reason == FinishReason.NONE, f"request {req_id} got something after its end"
            if token >= 0:
                seen.tokens.append(token)
            seen.reason = FinishReason(reason)
            if token >= 0 and reason and self.specs[req_id].pin:
                self.pinned.add(req_id)

    # ------------------------------------------------------------------------------------------------------ verdict

    def judge(self, spec: Spec) -> None:
        seen = self.seen[spec.req_id]
        who = f"request {spec.req_id}"
        if len(spec.prompt) >= self.limit:
            assert (seen.reason, seen.tokens) == (FinishReason.ERROR, []), f"{who} could never fit"
            return
        want = alone(spec, self.limit, self.has_states)
        assert seen.tokens == want[: len(seen.tokens)], f"{who}: {seen.tokens} is not the beginning of {want}"
        stopped = want[-1] == EOS and not spec.ignore_eos and len(want) >= spec.min_tokens
        natural = FinishReason.STOP if stopped else FinishReason.LENGTH
        allowed = {natural}
        if spec.abort_after >= 0:
            allowed.add(FinishReason.ABORT)
        if spec.finish_after >= 0:
            allowed.add(FinishReason.STOP)
        breaks = self.scenario.broken.get(spec.adapter, self.limit) < len(spec.prompt) + len(want)
        if breaks and spec.finish_after < 0 and spec.abort_after < 0 and not self.scenario.fail_steps:
            expected = max(0, self.scenario.broken[spec.adapter] + 1 - len(spec.prompt))
            lasts = expected >= len(want)
            assert (seen.reason, len(seen.tokens)) == (
                (natural, len(want)) if lasts else (FinishReason.ERROR, expected)
            )
            return
        if breaks or self.scenario.fail_steps:
            allowed.add(FinishReason.ERROR)
        assert seen.reason in allowed, f"{who} ended with {seen.reason!r}, not {allowed}"
        if spec.finish_after < 0 and spec.abort_after < 0 and not self.scenario.fail_steps:
            assert seen.tokens == want, f"{who}: {seen.tokens}, alone {want}"

    def audit(self) -> None:
        """Assert, if nothing is in flight, that every cached page holds the KV of its path."""
        if self.previous is not None or self.failed_step is not None:
            return
        size = self.scenario.config.page_size
        for path, page in self.plane.tree_pages():
            adapter, tokens = split_path(path)
            want = EchoModel.kv(tokens, adapter)[-size:]
            assert self.engine.page_kv(page) == want, f"page {page} does not hold {path}"
        for path, slot in self.plane.tree_states():
            assert self.engine.checkpoint(slot) == EchoModel.state(*split_path(path)), f"no state of {path} in {slot}"
        paths = {split_path(path) for path, _ in self.plane.tree_pages()}
        for req_id in self.pinned:
            prompt, adapter = self.specs[req_id].prompt, self.specs[req_id].adapter
            full = adapter, tuple(prompt[: len(prompt) // size * size])
            assert not full[1] or full in paths, f"the pin of request {req_id} is gone"

    def follow_up(self) -> None:
        """Run a prompt that extends a cached path by a token; assert that it finds that path, except the last whole
        page."""
        paths = [split_path(path) for path, _ in self.plane.tree_pages()]
        if not paths:
            return
        adapter, longest = max(paths, key=lambda path: len(path[1]))
        prompt = [*longest, 0][: self.limit - 1]
        size = self.scenario.config.page_size
        usable = (len(prompt) - 1) // size * size
        most = min(len(longest), usable)
        if self.has_states:  # as far as a checkpoint on it
            saved = [
                tokens for one, tokens in (split_path(path) for path, _ in self.plane.tree_states()) if one == adapter
            ]
            most = max((len(one) for one in saved if len(one) <= most and longest[: len(one)] == one), default=0)
        spec = Spec(10_000, self.step, prompt, 1, seed=0, adapter=adapter)
        self.specs[spec.req_id], self.seen[spec.req_id] = spec, Seen()
        self.engine.fail_steps = set()
        self.engine.broken_adapters = {}
        self.scenario.clear_steps, self.scenario.broken = set(), {}
        arrivals = [spec]
        while arrivals or not self.idle:
            self.advance(arrivals)
            arrivals = []
        assert self.cached[spec.req_id] == most, "a cached path was not found"
        self.judge(spec)


def split_path(path: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the namespace and the tokens of a path of `tree_pages`."""
    return (-path[0], path[1:]) if path[0] < 0 else (0, path)


def run(scenario: Scenario, factory: Factory) -> Driver:
    driver = Driver(scenario, factory)
    driver.run()
    return driver
