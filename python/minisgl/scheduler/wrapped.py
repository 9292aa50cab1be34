"""A scheduler around another one: whoever adds something to some calls says only these.

What is not overridden is the inner one's.
"""

from __future__ import annotations

from minisgl.scheduler.api import ControlPlane, Stats, TreeView, metadata_time_ns
from minisgl.step import Events, Int32Array, StepBuffers, StepOutput, StepPlan


class WrappedControlPlane:
    def __init__(self, inner: ControlPlane) -> None:
        self._inner = inner

    def schedule(self, step: int, events: Events) -> StepPlan:
        return self._inner.schedule(step, events)

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        return self._inner.commit(step, tokens)

    def stats(self) -> Stats:
        return self._inner.stats()

    def tree_view(self, limit: int) -> TreeView:
        return self._inner.tree_view(limit)

    def check(self) -> None:
        self._inner.check()

    @property
    def buffers(self) -> StepBuffers:
        return self._inner.buffers

    @property
    def metadata_ns(self) -> int:
        return metadata_time_ns(self._inner)
