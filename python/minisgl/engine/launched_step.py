"""One step that a CUDA engine has launched: what it will leave on the host, and when.

Keeps true: its results leave the stage when it is settled, once, whoever asks first; a step whose numbers are not
finite is an error, and has what it may have left in the KV pool wiped.
Doesn't know: how a step is queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from minisgl.distributed import GroupError
from minisgl.engine.api import EngineStepError, PromptLogprobs, StepLogprobs, StepResult
from minisgl.engine.cuda_errors import EngineDeadError
from minisgl.engine.device_buffers import Stage
from minisgl.engine.device_queue import Mark
from minisgl.step import RingEntry, StepPlan

_NOT_FINITE = "the model's output is not finite (overflow? try --dtype bfloat16 or float32)"


class Owner(Protocol):
    def wipe(self) -> None:
        """Zero the KV pool, behind what is queued."""

    def failure(self, step: int, error: BaseException) -> BaseException:
        """What `error` in `step` means."""


class Late:
    """What a step's forward leaves to be read when it is done."""

    def __init__(self) -> None:
        self.sampled: Callable[[], StepLogprobs] | None = None
        self.prompts: list[Callable[[], PromptLogprobs]] = []


class LaunchedStep:
    """A `StepHandle`. Its results leave the stage when it is settled, so that the stage can be used again."""

    def __init__(self, engine: Owner, plan: StepPlan, entry: RingEntry, stage: Stage) -> None:
        self._engine = engine
        self._step = plan.step
        self._num_rows = plan.num_rows
        self._sampled = entry.sample_rows[: plan.num_samples].copy()
        self._stage = stage
        self.late = Late()
        self.start: Mark | None = None
        self.computed: Mark | None = None  # the forward is through
        self.end: Mark | None = None  # the results are on the host
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._failure: EngineStepError | None = None
        self._span = (0.0, 0.0)

    def fail(self, failure: EngineStepError, queued: Mark) -> None:
        """The launch stopped half way; what it had queued is through at `queued`."""
        self._failure = failure
        self.computed = self.end = queued

    def settle(self) -> None:
        if self._result is not None or self._error is not None:
            return
        if self.end is None:
            self._error = EngineDeadError(f"step {self._step} was not launched to its end")
            return
        try:
            self.end.wait()
            if self._failure is not None:
                raise self._failure
            assert self.start is not None and self.computed is not None
            now = time.perf_counter()
            self._span = (now - self.computed.seconds_after(self.start), now)
            self._result = self._read()
        except (RuntimeError, MemoryError, GroupError) as error:
            self._error = self._engine.failure(self._step, error)

    def _read(self) -> StepResult:
        tokens = np.full(self._num_rows, -1, np.int32)
        if not self._num_rows:
            return StepResult(tokens)
        count = len(self._sampled)
        back = self._stage.out_host[: count + 1].numpy()
        if not back[count]:
            self._engine.wipe()
            raise EngineStepError(_NOT_FINITE)
        tokens[self._sampled] = back[:count]
        logprobs = None if self.late.sampled is None else self.late.sampled()
        return StepResult(tokens, logprobs, [later() for later in self.late.prompts])

    def wait(self) -> StepResult:
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        if self._result is not None or self._error is not None:
            return True
        try:
            return self.end is not None and self.end.reached()
        except RuntimeError:  # the device has failed: `wait` says how
            return True

    def span(self) -> tuple[float, float]:
        return self._span
