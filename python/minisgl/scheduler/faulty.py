"""A scheduler that fails on order, for tests of what happens then.

Until it fails it is the one inside; afterwards it refuses every call, as a broken one does.
"""

from __future__ import annotations

from typing import Literal

from minisgl.scheduler.api import ControlPlane, ControlPlaneError
from minisgl.scheduler.wrapped import WrappedControlPlane
from minisgl.step import Events, Int32Array, StepOutput, StepPlan

Call = Literal["schedule", "commit"]
When = Literal["before", "after"]


class FaultyControlPlane(WrappedControlPlane):
    """Fails in `call` of step `step`, before or after that took effect in `inner`."""

    def __init__(self, inner: ControlPlane, call: Call, step: int, when: When) -> None:
        super().__init__(inner)
        self._fault = (call, step)
        self._when = when
        self._dead = False

    def schedule(self, step: int, events: Events) -> StepPlan:
        self._maybe_fail("schedule", step, "before")
        plan = self._inner.schedule(step, events)
        self._maybe_fail("schedule", step, "after")
        return plan

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        self._maybe_fail("commit", step, "before")
        output = self._inner.commit(step, tokens)
        self._maybe_fail("commit", step, "after")
        return output

    def _maybe_fail(self, call: Call, step: int, when: When) -> None:
        if self._dead or ((call, step) == self._fault and when == self._when):
            self._dead = True
            raise ControlPlaneError(f"{call}({step}) fails on order, {when} it took effect")


def make_faulty(inner: ControlPlane, order: str) -> FaultyControlPlane:
    """`order` is "CALL:STEP:WHEN", such as "commit:40:after". Raises `ValueError`."""
    call, _, rest = order.partition(":")
    step, _, when = rest.partition(":")
    if call not in ("schedule", "commit") or when not in ("before", "after") or not step.isdecimal():
        raise ValueError(f"{order!r}: must be like commit:40:after")
    return FaultyControlPlane(inner, call, int(step), when)  # type: ignore[arg-type]
