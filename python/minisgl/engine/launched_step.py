"""A step that the torch engine has launched, and its outputs or its error once its forward has ended.

Invariants: outputs are read from the staging buffer once, when the step is resolved, by any caller; work that waits for
the previous step is queued when that step is resolved, before any work of a later step; only an error that is known to
leave the device usable fails one step alone, after any other error the engine is dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.distributed import GroupError
from minisgl.engine.api import (
    NOT_FINITE_TEXT,
    Embedding,
    EngineStepError,
    PromptLogprobs,
    SlotAssignment,
    StepLogprobs,
    StepResult,
)
from minisgl.engine.device import DeviceEvent, StagingBuffer
from minisgl.engine.graphs import Outputs
from minisgl.step import NOT_FINITE, Int32Array, Int64Array, RingEntry, StepPlan


class EngineDeadError(RuntimeError):
    """Error after which the device's context is or may be broken: no later step can be trusted."""


Failure = EngineStepError | EngineDeadError | GroupError


def step_failure(step: int, error: BaseException, ranks: int = 1, *, survives: bool = False) -> Failure:
    """Return the exception to raise for `error` in step `step`: `EngineStepError` if the engine can continue, else
    `EngineDeadError`. `survives`: errors of jobs leave the device usable."""
    if isinstance(error, Failure):
        return error
    text, ends = f"{type(error).__name__}: {error}", ": the torch engine cannot go on"
    if isinstance(error, torch.OutOfMemoryError):  # the allocator refused; nothing was launched
        text, ends = f"{str(error).splitlines()[0]} (lower --memory-ratio or --max-prefill-length)", ""
        survives = True
    return EngineStepError(text) if survives and ranks == 1 else EngineDeadError(f"step {step}: {text}{ends}")


class Launcher(Protocol):
    """The interface of the engine that its launched steps call."""

    def begin(self, step: LaunchedStep) -> None:
        """Queue the work of `step` that had to wait for the previous step."""

    def record(self, step: LaunchedStep, tokens: Int32Array) -> dict[int, str]:
        """Advance the grammars of the sampled rows by their tokens. Returns failure reasons by index of the row."""

    def mark_invalid(self, slots: Int32Array) -> None:
        """Mark the pages of `slots` as invalid, because their rows are not finite."""

    def failure(self, step: int, error: BaseException) -> Failure: ...


class Deferred:
    """Log probabilities and embeddings of a forward on the device; a call copies some to the host, after its end."""

    def __init__(self) -> None:
        self.sampled: Callable[[], StepLogprobs] | None = None
        self.prompts: list[Callable[[], PromptLogprobs]] = []
        self.embeddings: list[Callable[[], Embedding]] = []


class LaunchedStep:
    """A launched step of the torch engine; implements `StepHandle`."""

    def __init__(self, engine: Launcher, plan: StepPlan, entry: RingEntry, buffer: StagingBuffer) -> None:
        self._engine = engine
        self.plan = plan  # only the forward reads plan and entry: a later step may reuse them
        self.entry = entry
        self.buffer = buffer
        self.freed: Int32Array = entry.freed[:0]  # slots whose grammars end
        self.assignments: Sequence[SlotAssignment] = ()  # those with grammars to assign
        self.slots: list[int] = []  # slots of the sampled rows, if one of them has a grammar
        self.outputs: Outputs | None = None  # of the forward, until the step is sampled
        self.hidden: Tensor | None = None
        self.adapters: Int64Array | None = None  # ids by token, if any token has one
        self.tail: Callable[[], None] | None = None  # queues the sampling, if that waits for a grammar
        self._before: LaunchedStep | None = None
        self._after: LaunchedStep | None = None
        self.sampled = entry.sample_rows[: plan.num_samples].astype(np.int64)
        self._row_slots = entry.req_slots[: plan.num_rows].copy()
        self._step = plan.step
        self._num_rows = plan.num_rows
        self.deferred = Deferred()
        self.start: DeviceEvent | None = None
        self.computed: DeviceEvent | None = None  # end of the forward
        self.end: DeviceEvent | None = None  # end of the copy: the outputs are on the host
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._failure: EngineStepError | None = None
        self._span = (0.0, 0.0)

    @property
    def is_resolved(self) -> bool:
        return self._result is not None or self._error is not None

    def follow(self, before: LaunchedStep | None) -> None:
        """Begin the step when `before` is resolved; at once if it is None or resolved."""
        if before is None or before.is_resolved:
            self._begin()
        else:
            self._before, before._after = before, self

    def _begin(self) -> None:
        try:
            self._engine.begin(self)
        except (RuntimeError, MemoryError, GroupError) as error:
            self._error = self._engine.failure(self._step, error)

    def fail(self, failure: EngineStepError, queued: DeviceEvent) -> None:
        """Record that the launch failed half way. The work that it had queued has ended at the event `queued`."""
        self._failure = failure
        self.computed = self.end = queued

    def resolve(self) -> None:
        """Wait for the step's end, after the previous step, and store its result or error. Idempotent."""
        if self._before is not None:
            self._before.resolve()
        if self.is_resolved:
            return
        self._resolve()
        if (after := self._after) is not None:
            self._after = after._before = None
            after._begin()

    def _resolve(self) -> None:
        if self.end is None:
            self._error = EngineDeadError(f"step {self._step} was not launched completely")
            return
        try:
            self.end.synchronize()
            if self._failure is not None:
                raise self._failure
            assert self.start is not None and self.computed is not None
            now = time.perf_counter()
            self._span = (now - self.computed.seconds_since(self.start), now)
            self._result = self._read()
        except (RuntimeError, MemoryError, GroupError) as error:
            self._error = self._engine.failure(self._step, error)

    def _read(self) -> StepResult:
        tokens = np.full(self._num_rows, -1, np.int32)
        if not self._num_rows:
            return StepResult(tokens)
        count = len(self.sampled)
        outputs = self.buffer.outputs_host[: count + self._num_rows].numpy()
        not_finite = np.flatnonzero(outputs[count:] == 0)
        failures: dict[int, str] = {}
        if self.slots:
            outputs = outputs.copy()
            failed = self._engine.record(self, outputs)
            failures = {int(self.sampled[i]): text for i, text in failed.items()}
        tokens[self.sampled] = outputs[:count]
        if len(not_finite):
            self._engine.mark_invalid(self._row_slots[not_finite])
            tokens[not_finite] = NOT_FINITE
            failures |= dict.fromkeys(not_finite.tolist(), NOT_FINITE_TEXT)
        logprobs = None if self.deferred.sampled is None else self.deferred.sampled()
        prompts = [fetch() for fetch in self.deferred.prompts]
        embeddings = [fetch() for fetch in self.deferred.embeddings]
        return StepResult(tokens, logprobs, prompts, failures, embeddings)

    def wait(self) -> StepResult:
        self.resolve()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        if self.is_resolved:
            return True
        try:
            return self.end is not None and self.end.query()
        except RuntimeError:  # the device has failed: `wait` raises its error
            return True

    def span(self) -> tuple[float, float]:
        return self._span
