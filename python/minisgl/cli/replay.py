"""`minisgl replay FILE`: drive control planes with a recorded trace, compare their decisions, time them.

The last line of stdout is JSON; exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from minisgl.cli.flags import Commands, Formatter
from minisgl.config import ConfigError


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "replay",
        help="drive control planes with a recorded trace and compare them",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("trace", type=Path, help="a file that `minisgl serve --record-trace` wrote")
    parser.add_argument(
        "--backend",
        action="append",
        choices=("python", "rust_hotpath"),
        help="may be given several times (default: both)",
    )
    parser.add_argument("--repeat", type=int, default=1, help="times that each is driven; the fastest counts")


def run(args: argparse.Namespace) -> int:
    from minisgl.scheduler.api import ControlPlaneError
    from minisgl.scheduler.backend import BACKENDS, make_control_plane
    from minisgl.scheduler.rust_hotpath import ExtensionMissing
    from minisgl.scheduler.trace import TraceError, read_trace, replay

    try:
        trace = read_trace(args.trace)
    except (TraceError, OSError) as error:
        raise ConfigError(str(error)) from error
    names = args.backend or list(BACKENDS)
    digests: dict[str, list[int]] = {}
    us_per_step: dict[str, float] = {}
    for name in names:
        try:
            runs = [replay(trace, make_control_plane(name, trace.config)) for _ in range(max(1, args.repeat))]
        except (ControlPlaneError, ExtensionMissing) as error:
            raise ConfigError(f"{name}: {error}") from error
        digests[name] = runs[0].digests
        us_per_step[name] = round(1e6 * min(one.seconds for one in runs) / max(1, runs[0].num_steps), 2)
        print(f"{name}: {runs[0].num_steps} steps, {us_per_step[name]} us a step")
    first = _first_difference(digests)
    if first is not None:
        step, given = trace.calls[first]
        call = "schedule" if hasattr(given, "items") else "commit"
        print(f"they differ first in call {first}: {call}({step})")
    report = {"calls": len(trace.calls), "us_per_step": us_per_step, "first_difference": first}
    print(json.dumps(report))
    return 0 if first is None else 1


def _first_difference(digests: dict[str, list[int]]) -> int | None:
    """Index of the first call in which not all agree."""
    for index, found in enumerate(zip(*digests.values(), strict=True)):
        if len(set(found)) > 1:
            return index
    return None
