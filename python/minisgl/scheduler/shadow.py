"""Shadow mode: a primary scheduler serves, and a second one gets the same calls and is compared with it. Also reads the
report of the differences, which may end in the middle of a line.

Invariants: only the primary's results are used; a shadow that differs too often, or fails, is no longer called; every
difference is in the report with the calls that led to it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.scheduler.api import ControlPlane, ControlPlaneError
from minisgl.scheduler.differences import (
    Difference,
    PlannedStep,
    count_differences,
    output_differences,
    plan_differences,
    tree_differences,
)
from minisgl.scheduler.wrapped import WrappedControlPlane
from minisgl.step import Events, Int32Array, StepOutput, StepPlan

TRAIL = 32  # calls recorded with each difference


@dataclass(slots=True)
class ShadowSummary:
    """Counts of the compared calls by result, and of all calls (`num_calls`)."""

    num_calls: int = 0
    num_equal: int = 0
    num_different: int = 0
    num_failed: int = 0
    num_diffs: int = 0  # fields that differed
    stopped: str = ""  # why the shadow was dropped
    first: dict[str, Any] | None = None  # first difference, as in the report
    first_index: int = 0  # index of its call

    def line(self) -> str:
        """Return the counts as one line of text."""
        num_compared = self.num_equal + self.num_different + self.num_failed
        counts = f"{self.num_equal} equal, {self.num_different} different, {self.num_failed} failed"
        return f"shadow: {num_compared} calls were compared: {counts}"


class ShadowControlPlane(WrappedControlPlane):
    """A scheduler that compares every `every_n`-th step, and the counters after it, with a shadow; it drops the shadow
    after `max_diffs` differences. `notify` gets a line at the first difference and when the shadow is dropped."""

    def __init__(
        self,
        primary: ControlPlane,
        shadow: ControlPlane,
        *,
        report: Path | None = None,
        every_n: int = 1,
        max_diffs: int = 100,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(primary)
        self._shadow = shadow
        self._report = report
        self._every_n = max(1, every_n)
        self._max_diffs = max_diffs
        self._notify = notify
        self._trail: deque[dict[str, Any]] = deque(maxlen=TRAIL)
        self._owners: dict[int, int] = {}  # request id by request slot
        self.summary = ShadowSummary()

    def schedule(self, step: int, events: Events) -> StepPlan:
        plan = self._inner.schedule(step, events)  # if this raises, the shadow is not called
        self._note(call="schedule", step=step, events=[_as_json(event) for event in events])
        self._follow(lambda: self._compare_plans(plan, self._shadow.schedule(step, events)))
        return plan

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        output = self._inner.commit(step, tokens)
        self._note(call="commit", step=step, tokens=tokens.tolist())
        self._follow(lambda: self._compare_outputs(output, self._shadow.commit(step, tokens)))
        return output

    def compare_trees(self) -> None:
        """Compare the prefix caches of primary and shadow in their current state. O(nodes)."""
        if not self.summary.stopped:
            for difference in tree_differences(self._inner, self._shadow):
                self._report_difference(difference)

    # ------------------------------------------------------------------------------------------------- comparison

    def _note(self, **call: Any) -> None:
        self.summary.num_calls += 1
        self._trail.append(call)

    def _follow(self, compare: Callable[[], None]) -> None:
        if self.summary.stopped:
            return
        try:
            compare()
        except (ControlPlaneError, ValueError) as error:
            self.summary.num_failed += 1
            self._report_difference(Difference("error", "none", f"{type(error).__name__}: {error}"))
            self._stop(f"the shadow failed: {error}")

    def _compare_plans(self, plan: StepPlan, other: StepPlan) -> None:
        ours = PlannedStep(plan, self._inner.buffers.ring[plan.ring_index])
        theirs = PlannedStep(other, self._shadow.buffers.ring[other.ring_index])
        slots = ours.entry.assigned[: plan.num_assigned, 0].tolist()
        self._owners.update(zip(slots, ours.entry.assigned_ids[: plan.num_assigned].tolist(), strict=True))
        if plan.step % self._every_n == 0:
            self._count(plan_differences(ours, theirs, self._owners))

    def _compare_outputs(self, output: StepOutput, other: StepOutput) -> None:
        if output.step % self._every_n == 0:
            self._count([*output_differences(output, other), *count_differences(self._inner, self._shadow)])

    def _count(self, differences: Iterable[Difference]) -> None:
        before = self.summary.num_diffs
        for difference in differences:
            self._report_difference(difference)
        if self.summary.num_diffs > before:
            self.summary.num_different += 1
        else:
            self.summary.num_equal += 1

    def _stop(self, why: str) -> None:
        self.summary.stopped = why
        self._notify(f"warning: shadow: dropped: {why}")

    def _report_difference(self, difference: Difference) -> None:
        summary = self.summary
        summary.num_diffs += 1
        line = {
            **{"what": difference.what, "primary": difference.primary, "shadow": difference.shadow},
            **{"index": difference.index, "request": difference.req_id, "trail": list(self._trail)},
        }
        if summary.num_diffs == 1:
            call = self._trail[-1]
            summary.first, summary.first_index = line, summary.num_calls - 1
            self._notify(f"warning: shadow: first difference in {call['call']}({call['step']}): {difference.what}")
        if summary.num_diffs == self._max_diffs:
            self._stop(f"{self._max_diffs} differences")
        if self._report is not None:
            with self._report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _as_json(event: object) -> dict[str, Any]:
    values: dict[str, Any] = {"event": type(event).__name__}
    for name in getattr(event, "__slots__", ()):
        value = getattr(event, name)
        values[name] = value.tolist() if hasattr(value, "tolist") else value
    return values


MAX_SHOWN = 160  # characters of a value
CALLS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """Summary of a shadow's report. `what` counts the differences by field; `first` is the first one, or `None`."""

    num_diffs: int
    what: dict[str, int]
    first: dict[str, Any] | None

    @property
    def first_call(self) -> str:
        """The call with the first difference, such as "schedule(12)"; empty if there is no difference."""
        return "" if self.first is None else call_of(self.first)

    def lines(self) -> Iterator[str]:
        """Yield the summary as lines of text."""
        yield f"{self.num_diffs} differences"
        for name, count in self.what.items():
            yield f"  {count:6} {name}"
        if self.first is not None:
            yield from difference_lines(self.first)


def call_of(difference: Mapping[str, Any]) -> str:
    """Return the call that differed, such as "schedule(12)"; empty if the report's line has no trail."""
    trail = difference["trail"]
    return f"{trail[-1]['call']}({trail[-1]['step']})" if trail else ""


def difference_lines(difference: Mapping[str, Any], names: tuple[str, str] = ("primary", "shadow")) -> Iterator[str]:
    """Yield a difference as lines of text: the field, the request, both values and the last calls. `names` are those of
    the two schedulers."""
    index, request = difference.get("index"), difference.get("request")
    element = "" if index is None else f"[{index}]"
    owner = "" if request is None else f", request {request}"
    yield f"the first, in {call_of(difference)}: {difference['what']}{element}{owner}"
    width = max(map(len, names))
    for name, key in zip(names, ("primary", "shadow"), strict=True):
        yield f"  {name:{width}} {_value(difference[key], index)}"
    yield "the calls up to it:"
    for call in difference["trail"][-CALLS_SHOWN:]:
        given = call.get("events", call.get("tokens"))
        yield f"  {call['call']}({call['step']}) {_shown(given)}"


def _value(value: Any, index: int | None) -> str:
    """Return a value as JSON; for an array, its differing element and its length."""
    if index is None:
        return _shown(value)
    return f"{_shown(value[index]) if index < len(value) else 'nothing'} (length {len(value)})"


def summarize_report(path: Path) -> ReportSummary:
    """Read a shadow's report. Raises `OSError`, and `ValueError` if a line is not of a report."""
    diffs = list(_diffs(path))
    what = Counter(str(difference["what"]) for difference in diffs)
    return ReportSummary(len(diffs), dict(what.most_common()), diffs[0] if diffs else None)


def _diffs(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            difference = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return  # truncated: a complete line ends with a newline
            raise ValueError(f"{path.name}: line {number}: {error}") from error
        if not isinstance(difference, dict) or not {"what", "primary", "shadow", "trail"} <= difference.keys():
            raise ValueError(f"{path.name}: line {number}: not a line of a shadow scheduler's report")
        yield difference


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
