"""The work of `minisgl replay`.

Invariants: the last line of stdout is JSON; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from minisgl.config import ConfigError
from minisgl.extension import ExtensionMissing
from minisgl.scheduler.api import ControlPlane, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import BACKENDS
from minisgl.scheduler.shadow import ShadowControlPlane, difference_lines, summarize_report
from minisgl.scheduler.trace import Replay, Trace, read_trace, replay


def run(args: argparse.Namespace) -> int:
    """Replay a trace, or summarize a shadow's report, and return the exit code. Raises `ConfigError`."""
    if (args.trace is None) == (args.report is None):
        raise ConfigError("trace: missing: give a trace, or --report FILE")
    if args.repeat < 1:
        raise ConfigError(f"--repeat {args.repeat}: must be at least 1")
    try:
        if args.report is not None:
            return _summarize(args.report)
        trace = read_trace(args.trace)
    except OSError as error:
        raise ConfigError(f"{args.report or args.trace}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return _compare(trace, list(dict.fromkeys(args.backend or BACKENDS)), args.repeat)


def _summarize(path: Path) -> int:
    summary = summarize_report(path)
    print("\n".join(summary.lines()))
    print(json.dumps({"differences": summary.num_diffs, "what": summary.what, "first": summary.first_call or None}))
    return 1 if summary.num_diffs else 0


def _compare(trace: Trace, names: list[str], repeat: int) -> int:
    replays: dict[str, Replay] = {}
    for name in names:
        runs = [replay(trace, _make(name, trace)) for _ in range(repeat)]
        best = replays[name] = min(runs, key=lambda run: run.seconds)
        print(f"{name}: {best.num_steps} steps, {_times(best)}")
        if best.error:
            print(f"{name}: {trace.call_name(len(best.digests))} failed: {best.error}")
    errors = {name: run.error for name, run in replays.items() if run.error}
    firsts = [run for other in names[1:] if (run := _difference(trace, replays, names[0], other)) is not None]
    first = min(firsts, key=lambda run: run.index, default=None)
    if first is not None:
        print(f"they differ first in call {first.index}: {trace.call_name(first.index)}")
        print("\n".join(difference_lines(first.line, first.names)))
    elif len(names) > 1 and not errors:
        what = "every plan, array and count, and the tree at the end, bit for bit"
        print(f"equal: {replays[names[0]].num_steps} steps, {len(trace.calls)} calls, {what}")
    elif len(names) == 1:
        print(f"{names[0]} ran alone: nothing was compared")
    report = {
        "calls": len(trace.calls),
        "us_per_step": {name: _mean_us(run) for name, run in replays.items()},
        "first_difference": None if first is None else first.index,
        "compared": len(names) > 1,
        "what": None if first is None else first.line["what"],
        "request": None if first is None else first.line["request"],
        "errors": errors,
    }
    print(json.dumps(report))
    return 0 if first is None and not errors else 1


def _make(name: str, trace: Trace) -> ControlPlane:
    """Build the scheduler `name` for a trace. Raises `ConfigError` if it is missing or does not support the trace."""
    try:
        return make_control_plane(name, trace.config)
    except (ControlPlaneError, ExtensionMissing, ValueError) as error:
        raise ConfigError(f"--backend {name}: {error}") from error


@dataclass(frozen=True, slots=True)
class _First:
    """The first difference of two schedulers: its call's index in the trace, and its line as a shadow reports it."""

    names: tuple[str, str]
    index: int
    line: dict[str, Any]


def _difference(trace: Trace, replays: dict[str, Replay], name: str, other: str) -> _First | None:
    """Return the first difference of two schedulers, or None. Both are driven in step, as in a server with a shadow;
    the one that got further is the reference. The prefix trees are compared after the last call."""
    if len(replays[other].digests) > len(replays[name].digests):
        name, other = other, name
    shadow = ShadowControlPlane(_make(name, trace), _make(other, trace), max_diffs=1)
    if not replay(trace, shadow).error:
        shadow.compare_trees()
    summary = shadow.summary
    return None if summary.first is None else _First((name, other), summary.first_index, summary.first)


def _mean_us(run: Replay) -> float:
    return round(1e6 * run.seconds / max(1, run.num_steps), 2)


def _times(run: Replay) -> str:
    if not run.schedule_ns or not run.commit_ns:
        return f"{_mean_us(run)} us a step"
    schedule, commit = median(run.schedule_ns) / 1000, median(run.commit_ns) / 1000
    return f"{_mean_us(run)} us a step on average (medians: schedule {schedule:.2f}, commit {commit:.2f})"
