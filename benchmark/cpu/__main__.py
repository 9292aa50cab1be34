"""The CPU engine measured against its bars: `python -m benchmark.cpu PART`, from the repository's root.

Keeps true: every part ends with one line of JSON on stdout; with `--out` it writes raw.json and a report.
Doesn't know: how anything is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.bench.report import public_command

PARTS = ("limits", "offline", "growth", "http", "startup", "quality", "text")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="benchmark.cpu", description=(__doc__ or "").splitlines()[0])
    top.add_argument("part", choices=PARTS)
    top.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    top.add_argument("--rounds", type=int, help="of every figure (default: the part's own)")
    top.add_argument("--threads", type=int, default=2, help="of every arm (default: %(default)s)")
    top.add_argument(
        "--llama-bin",
        action="append",
        default=[],
        metavar="DIR",
        help="llama.cpp's programs, from a native build; NAME=DIR for another build beside it",
    )
    top.add_argument("--models", type=Path, metavar="DIR", help="keep the random weights there (default: made anew)")
    top.add_argument("--only", nargs="+", metavar="NAME", help="of offline: its parts; of growth: its sweeps")
    top.add_argument("--arms", nargs="+", metavar="ARM", help="only these")
    top.add_argument("--tokens", type=int, default=2000, help="of quality: compared (default: %(default)s)")
    top.add_argument("--rehearse", action="store_true", help="tiny and without a model, to try the command itself")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(given)
    command = public_command(given).replace("minisgl bench", "python -m benchmark.cpu", 1)
    return run(args, command)


def run(args: argparse.Namespace, command: str) -> int:
    """Imports only the part that is asked for: some need torch."""
    if args.part == "limits":
        from benchmark.cpu import limits
        from minisgl.bench.report import print_result

        found = limits.measure(args.threads)
        print(limits.limits_table(found))
        print_result({"bench": "cpu limits", **found})
        return 0
    if args.part == "offline":
        from benchmark.cpu import offline
        from benchmark.cpu.arms import llama_folders

        offline.run(
            offline.Settings(
                rounds=args.rounds or offline.Settings.rounds,
                threads=args.threads,
                llama=llama_folders(args.llama_bin),
                models=args.models,
                parts=args.only or offline.PARTS,
                arms=args.arms,
                rehearse=args.rehearse,
            ),
            args.out,
            command,
        )
        return 0
    if args.part == "growth":
        from benchmark.cpu import growth

        sweeps, arms = args.only or list(growth.SWEEPS), args.arms or growth.DEFAULT_ARMS
        growth.run(sweeps, arms, args.rounds or 2, args.threads, args.out, command, args.rehearse)
        return 0
    raise NotImplementedError(args.part)


if __name__ == "__main__":
    sys.exit(main())
