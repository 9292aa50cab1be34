"""The command `minisgl replay FILE`, which runs schedulers on a recorded trace, compares their decisions and times
them. With `--report`, it summarizes what a shadow reported.

Invariants: parsing imports no scheduler.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from minisgl import envs
from minisgl.cli.flags import Commands, command, say


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(commands, "replay", run, help="drive schedulers with a recorded trace and compare them")
    parser.add_argument("trace", nargs="?", type=Path, help="a file that `minisgl serve --record-trace` wrote")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="scheduler, as in MINISGL_CPU_BACKEND; repeatable (default: python, rust_hotpath)",
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs of each scheduler; the fastest counts")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="instead of a trace: summarize the report of a shadow (MINISGL_CPU_BACKEND_SHADOW_REPORT)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    say(envs.notices(), "replay")
    from minisgl.cli import replay_run

    return replay_run.run(args)
