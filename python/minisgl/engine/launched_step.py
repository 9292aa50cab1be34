"""A step that a CUDA engine has launched: its outputs, once they are on the host.

Invariants: its outputs leave the staging buffer once, when it is resolved, whoever asks first; what of it waits for the
step before it is queued when that is resolved, before anything of a later step; a step with NaN or infinities is an
error, and the KV pool is wiped, as the step may have stored some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from minisgl.distributed import GroupError
from minisgl.engine.api import EngineStepError, PromptLogprobs, SlotAssignment, StepLogprobs, StepResult
from minisgl.engine.cuda_errors import EngineDeadError
from minisgl.engine.device_buffers import StagingBuffer
from minisgl.engine.device_streams import DeviceEvent
from minisgl.engine.graph import Outputs
from minisgl.step import Int32Array, Int64Array, RingEntry, StepPlan

_NOT_FINITE = "the model's output is not finite (overflow? try --dtype bfloat16 or float32)"


class Owner(Protocol):
    def wipe(self) -> None:
        """Zero the KV pool, behind what is queued."""

    def failure(self, step: int, error: BaseException) -> BaseException:
        """What `error` in `step` means."""

    def begin(self, step: LaunchedStep) -> None:
        """The step before `step` is resolved: queue what of it waited for that."""

    def record(self, step: LaunchedStep, tokens: Int32Array) -> dict[int, str]:
        """Its rows with grammars sampled `tokens`; see `GrammarSlots.record`."""


class DeferredLogprobs:
    """Log probabilities that a forward computes; each call copies some to the host, once the forward is done."""

    def __init__(self) -> None:
        self.sampled: Callable[[], StepLogprobs] | None = None
        self.prompts: list[Callable[[], PromptLogprobs]] = []


class LaunchedStep:
    """A `StepHandle`."""

    def __init__(self, engine: Owner, plan: StepPlan, entry: RingEntry, buffer: StagingBuffer) -> None:
        self._engine = engine
        self.plan = plan  # it and the entry are read by the forward only: a later step may have them
        self.entry = entry
        self.buffer = buffer
        self.freed: Int32Array = entry.freed[:0]  # slots that grammars must hear of
        self.assignments: Sequence[SlotAssignment] = ()  # the same
        self.slots: list[int] = []  # of the sampled rows, if one of them has a grammar
        self.outputs: Outputs | None = None  # of its forward, until it is sampled
        self.hidden: Tensor | None = None
        self.adapters: Int64Array | None = None  # by token, if any has one
        self.tail: Callable[[], None] | None = None  # queues its sampling, which a grammar makes wait
        self._before: LaunchedStep | None = None
        self._after: LaunchedStep | None = None
        self.sampled = entry.sample_rows[: plan.num_samples].astype(np.int64)
        self._step = plan.step
        self._num_rows = plan.num_rows
        self.logprobs = DeferredLogprobs()
        self.start: DeviceEvent | None = None
        self.computed: DeviceEvent | None = None  # the forward has ended
        self.end: DeviceEvent | None = None  # the outputs are on the host
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._failure: EngineStepError | None = None
        self._span = (0.0, 0.0)

    @property
    def is_resolved(self) -> bool:
        return self._result is not None or self._error is not None

    def follow(self, before: LaunchedStep | None) -> None:
        """Begin when `before` is resolved, or now."""
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
        """The launch stopped half way; what it had queued has ended at `queued`."""
        self._failure = failure
        self.computed = self.end = queued

    def resolve(self) -> None:
        """Wait for its end and keep its result or error, so that its staging buffer can be used again."""
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
            self._error = EngineDeadError(f"step {self._step} was not launched to its end")
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
        outputs = self.buffer.outputs_host[: count + 1].numpy()
        if not outputs[count]:
            self._engine.wipe()
            raise EngineStepError(_NOT_FINITE)
        failures: dict[int, str] = {}
        if self.slots:
            outputs = outputs.copy()
            failed = self._engine.record(self, outputs)
            failures = {int(self.sampled[i]): text for i, text in failed.items()}
        tokens[self.sampled] = outputs[:count]
        logprobs = None if self.logprobs.sampled is None else self.logprobs.sampled()
        return StepResult(tokens, logprobs, [fetch() for fetch in self.logprobs.prompts], failures)

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
        except RuntimeError:  # the device has failed: `wait` says how
            return True

    def span(self) -> tuple[float, float]:
        return self._span
