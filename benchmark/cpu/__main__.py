"""The CPU engine measured against its bars: `python -m benchmark.cpu PART`, from the repository's root.

Every part ends with one line of JSON on stdout; with `--out` it writes raw.json and a report. Whoever ends it by
SIGTERM ends what it started.
"""

from __future__ import annotations

import argparse
import signal
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
    top.add_argument("--threads", type=int, default=2, help="of every variant (default: %(default)s)")
    top.add_argument(
        "--llama-bin",
        action="append",
        default=[],
        metavar="DIR",
        help="llama.cpp's programs, from a native build; NAME=DIR for another build beside it",
    )
    top.add_argument("--models", type=Path, metavar="DIR", help="keep the random weights there (default: made anew)")
    top.add_argument("--only", nargs="+", metavar="NAME", help="of offline: its parts; of growth: its sweeps")
    top.add_argument("--variants", "--arms", nargs="+", metavar="VARIANT", help="only these")
    top.add_argument("--tokens", type=int, default=2000, help="of quality: compared (default: %(default)s)")
    top.add_argument("--rehearse", action="store_true", help="tiny and without a model, to try the command itself")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(given)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = public_command(given).replace("minisgl bench", "python -m benchmark.cpu", 1)
    return run(args, command)


def run(args: argparse.Namespace, command: str) -> int:
    """Imports only the part that is asked for: some need torch."""
    from benchmark.cpu import http, variants

    llama = variants.llama_folders(args.llama_bin)
    servers = http.Settings(
        variants=args.variants or http.default_variants(llama, rehearse=args.rehearse),
        llama=llama,
        rounds=args.rounds or (1 if args.rehearse else 3),
        threads=args.threads,
        rehearse=args.rehearse,
    )
    if args.part == "limits":
        _limits(args)
    elif args.part == "offline":
        _offline(args, command, llama)
    elif args.part == "growth":
        from benchmark.cpu import growth

        sweeps, names = args.only or list(growth.SWEEPS), args.variants or growth.DEFAULT_VARIANTS
        growth.run(sweeps, names, args.rounds or 2, args.threads, args.out, command, args.rehearse)
    elif args.part == "http":
        http.run(servers, args.out, command)
    elif args.part == "startup":
        from benchmark.cpu import startup

        engines = args.variants or (["echo"] if args.rehearse else ["cpu", "torch"])
        startup.run(engines, servers.rounds, args.threads, args.out, command, rehearse=args.rehearse)
    elif args.part == "quality":
        from benchmark.cpu import quality

        quality.run(args.variants or quality.VARIANTS, args.tokens, args.threads, args.out, command)
    elif args.part == "text":
        from benchmark.cpu import text

        text.run(args.variants or text.DEFAULT_VARIANTS, servers, args.out, command)
    return 0


def _limits(args: argparse.Namespace) -> None:
    from benchmark.cpu import limits
    from minisgl.bench.report import print_result

    found = limits.measure(args.threads)
    print(limits.limits_table(found))
    print_result({"bench": "cpu limits", **found})


def _offline(args: argparse.Namespace, command: str, llama: dict[str, Path]) -> None:
    from benchmark.cpu import offline

    settings = offline.Settings(
        rounds=args.rounds or offline.Settings.rounds,
        threads=args.threads,
        llama=llama,
        models=args.models,
        parts=args.only or offline.PARTS,
        variants=args.variants,
        rehearse=args.rehearse,
    )
    offline.run(settings, args.out, command)


if __name__ == "__main__":
    sys.exit(main())
