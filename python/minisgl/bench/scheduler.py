"""The command `minisgl bench scheduler`: the time of scheduling a step, for each scheduler in one run.

It refuses to measure a debug build of the extension, or a missing one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minisgl.bench.report import print_result
from minisgl.bench.scheduler_cases import CASES, SMALLEST, in_rounds
from minisgl.extension import _rust, why_missing
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import BACKENDS, RUST_PARTS

DESCRIPTION = """Time of a step's scheduling, `schedule` and `commit` as seen from Python, for each scheduler in one
run of about half a minute. Prints median, minimum, p90, p95 and p99 of each case in us, each the median of five
rounds through all cases; the lowest and the highest of the rounds' medians; its bar. The last line of stdout is JSON
with the medians. The garbage collector is off while a case runs."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "scheduler",
        help="time of a step's scheduling, each scheduler",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["rust_hotpath", RUST_PARTS, "python"],
        metavar="NAME",
        help=f"of {', '.join(BACKENDS)}, {RUST_PARTS}, {RUST_PARTS}:PART,PART; default: all three",
    )
    parser.add_argument(
        "--case", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--gate", action="store_true", help="exit with code 1 if a case exceeds its bar")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for all figures as JSON")
    return parser


def refusal(backends: Sequence[str]) -> str | None:
    """Return why this build cannot be measured, or None."""
    if set(backends) == {"python"}:
        return None
    if why := why_missing():
        return f"the extension is missing: {why}"
    profile = _rust.build_info()["profile"]
    if profile != "release":
        return f"the extension is a {profile} build; only release is measured"
    try:
        for backend in backends:
            make_control_plane(backend, SMALLEST)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def run(args: argparse.Namespace) -> int:
    if (why := refusal(args.backend)) is not None:
        print(f"minisgl bench scheduler: {why}", file=sys.stderr)
        return 2
    wanted = [(name, backend) for name in args.case for backend in args.backend]
    makes = {each: partial(make_control_plane, each) for each in args.backend}
    runs = [partial(CASES[name].case, makes[each], CASES[name].repeats_of(each)) for name, each in wanted]
    figures: dict[str, dict[str, dict[str, float]]] = {backend: {} for backend in args.backend}
    missed = 0
    for (name, backend), case in zip(wanted, in_rounds(runs), strict=True):
        figures[backend][name] = case
        missed += not show(name, backend, case, CASES[name].bars.get(backend), gate=args.gate)
    if args.out is not None:
        args.out.write_text(json.dumps({"build": "release", "us": figures}, indent=1) + "\n")
    medians = {b: {name: case["median"] for name, case in cases.items()} for b, cases in figures.items()}
    print_result({"build": "release", "us": medians})
    return 1 if args.gate and missed else 0


def show(name: str, backend: str, figures: dict[str, float], bar: float | None, *, gate: bool = False) -> bool:
    """Print a case's line, with its bar if `gate`. Return True if the bar is met or there is none."""
    met = bar is None or figures["median"] <= bar
    columns = "".join(f"{key} {value:10.2f}  " for key, value in figures.items())
    text = "" if bar is None or not gate else f"  at most {bar:g}: {'met' if met else 'missed'}"
    print(f"{name:20} {backend:23} {columns}{text}", flush=True)
    return met
