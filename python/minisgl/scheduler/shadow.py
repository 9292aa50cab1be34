"""Two schedulers under the same calls: one serves, the other is compared with it; and reading the report of that, up to
the cut if it was cut off.

Invariants: what is served comes from the primary alone; a shadow that differs too often, or fails, is left out from
then on; every difference stands in the report with the calls that led to it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from minisgl.scheduler.api import ControlPlane, ControlPlaneError
from minisgl.scheduler.digest import live_regions
from minisgl.scheduler.wrapped import WrappedControlPlane
from minisgl.step import Events, Int32Array, RingEntry, StepOutput, StepPlan

TRAIL = 32  # calls that a report shows
OUTPUT_ARRAYS = ("req_ids", "tokens", "reasons", "rows")
PLAN_FIELDS = tuple(field.name for field in fields(StepPlan))


@dataclass(slots=True)
class ShadowSummary:
    num_calls: int = 0
    num_compared: int = 0
    num_diffs: int = 0
    stopped: str = ""  # why the shadow is left out


class ShadowControlPlane(WrappedControlPlane):
    """Compares every `every_n`-th step and the counts after it; gives up after `max_diffs` differences. `notify` gets a
    line at the first difference, and when it gives up."""

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
        self.summary = ShadowSummary()

    def schedule(self, step: int, events: Events) -> StepPlan:
        plan = self._inner.schedule(step, events)  # an error of the primary is the caller's; the shadow never saw it
        self._note(call="schedule", step=step, events=[_as_json(event) for event in events])
        self._follow(lambda: self._compare_plans(plan, self._shadow.schedule(step, events)))
        return plan

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        output = self._inner.commit(step, tokens)
        self._note(call="commit", step=step, tokens=tokens.tolist())
        self._follow(lambda: self._compare_outputs(output, self._shadow.commit(step, tokens)))
        return output

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
            self._differs("error", "none", f"{type(error).__name__}: {error}")
            self._stop(f"the shadow failed: {error}")

    def _compare_plans(self, plan: StepPlan, other: StepPlan) -> None:
        if plan.step % self._every_n:
            return
        self.summary.num_compared += 1
        for name in PLAN_FIELDS:
            self._same(f"plan.{name}", getattr(plan, name), getattr(other, name))
        ours = live_regions(plan, self._inner.buffers.ring[plan.ring_index])
        theirs = live_regions(plan, self._shadow.buffers.ring[other.ring_index])
        for name, one, two in zip(RingEntry.__slots__, ours, theirs, strict=True):
            if one.tobytes() != two.tobytes():
                self._differs(name, one.tolist(), two.tolist())

    def _compare_outputs(self, output: StepOutput, other: StepOutput) -> None:
        if output.step % self._every_n:
            return
        for name in OUTPUT_ARRAYS:
            one, two = getattr(output, name), getattr(other, name)
            if one.tobytes() != two.tobytes():
                self._differs(f"output.{name}", one.tolist(), two.tolist())
        self._same("stats", asdict(self._inner.stats()), asdict(self._shadow.stats()))

    def _stop(self, why: str) -> None:
        self.summary.stopped = why
        self._notify(f"shadow: left out from now on: {why}")

    def _same(self, what: str, one: object, two: object) -> None:
        if one != two:
            self._differs(what, one, two)

    def _differs(self, what: str, primary: object, shadow: object) -> None:
        self.summary.num_diffs += 1
        if self.summary.num_diffs == 1:
            call = self._trail[-1]
            self._notify(f"shadow: differs first in {call['call']}({call['step']}): {what}")
        if self.summary.num_diffs == self._max_diffs:
            self._stop(f"{self._max_diffs} differences")
        if self._report is not None:
            line = {"what": what, "primary": primary, "shadow": shadow, "trail": list(self._trail)}
            with self._report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _as_json(event: object) -> dict[str, Any]:
    found: dict[str, Any] = {"event": type(event).__name__}
    for name in getattr(event, "__slots__", ()):
        value = getattr(event, name)
        found[name] = value.tolist() if hasattr(value, "tolist") else value
    return found


MAX_SHOWN = 160  # characters of a value
CALLS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """`what` counts the differences by field; `first` is the first line of the report, if there is one."""

    num_diffs: int
    what: dict[str, int]
    first: dict[str, Any] | None

    @property
    def first_call(self) -> str:
        """Such as "schedule(12)"; empty if there is none."""
        trail = [] if self.first is None else self.first["trail"]
        return f"{trail[-1]['call']}({trail[-1]['step']})" if trail else ""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.num_diffs} differences"
        for name, count in self.what.items():
            yield f"  {count:6} {name}"
        if self.first is not None:
            yield f"the first, in {self.first_call}: {self.first['what']}"
            yield f"  primary {_shown(self.first['primary'])}"
            yield f"  shadow  {_shown(self.first['shadow'])}"
            yield "the calls before it:"
            for call in self.first["trail"][-CALLS_SHOWN:]:
                given = call.get("events", call.get("tokens"))
                yield f"  {call['call']}({call['step']}) {_shown(given)}"


def summarize_report(path: Path) -> ReportSummary:
    """Raises `OSError`, and `ValueError` for a file that is no report."""
    diffs = list(_diffs(path))
    what = Counter(str(one["what"]) for one in diffs)
    return ReportSummary(len(diffs), dict(what.most_common()), diffs[0] if diffs else None)


def _diffs(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return  # cut off: every whole line ends with a newline
            raise ValueError(f"{path.name}: line {number}: {error}") from error
        if not isinstance(found, dict) or not {"what", "primary", "shadow", "trail"} <= found.keys():
            raise ValueError(f"{path.name}: line {number}: not a shadow's report")
        yield found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
