"""The work of `minisgl replay`.

Invariants: the last line of stdout is JSON; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
from itertools import zip_longest
from pathlib import Path
from statistics import median

from minisgl.config import ConfigError
from minisgl.extension import ExtensionMissing
from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.backend import BACKENDS, make_control_plane
from minisgl.scheduler.shadow import summarize_report
from minisgl.scheduler.trace import Replay, Trace, read_trace, replay


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError`."""
    if (args.trace is None) == (args.report is None):
        raise ConfigError("give a trace, or --report FILE")
    if args.repeat < 1:
        raise ConfigError(f"--repeat: {args.repeat}: at least 1")
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
    found: dict[str, Replay] = {}
    for name in names:
        try:
            runs = [replay(trace, make_control_plane(name, trace.config)) for _ in range(repeat)]
        except (ControlPlaneError, ExtensionMissing) as error:
            raise ConfigError(f"{name}: {error}") from error
        best = found[name] = min(runs, key=lambda one: one.seconds)
        print(f"{name}: {best.num_steps} steps, {_times(best)}")
        if best.error:
            print(f"{name}: {trace.call_name(len(best.digests))} failed: {best.error}")
    first = _first_difference(found)
    if first is not None:
        print(f"they differ first in call {first}: {trace.call_name(first)}")
    report = {
        "calls": len(trace.calls),
        "us_per_step": {name: _mean_us(one) for name, one in found.items()},
        "first_difference": first,
        "errors": {name: one.error for name, one in found.items() if one.error},
    }
    print(json.dumps(report))
    return 0 if first is None and not report["errors"] else 1


def _mean_us(one: Replay) -> float:
    return round(1e6 * one.seconds / max(1, one.num_steps), 2)


def _times(one: Replay) -> str:
    if not one.schedule_ns or not one.commit_ns:
        return f"{_mean_us(one)} us a step"
    schedule, commit = median(one.schedule_ns) / 1000, median(one.commit_ns) / 1000
    return f"{_mean_us(one)} us a step (median: schedule {schedule:.2f}, commit {commit:.2f})"


def _first_difference(found: dict[str, Replay]) -> int | None:
    """Index of the first call in which not all agree; one that failed there differs from one that did not."""
    for index, digests in enumerate(zip_longest(*(one.digests for one in found.values()))):
        if len(set(digests)) > 1:
            return index
    return None
