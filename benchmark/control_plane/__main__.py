"""Time of a step's control plane, schedule + commit as seen from Python, for both implementations in one run; and of
single operations of the prefix cache (evict_one, match_1024, insert_1024), Rust's as seen from Rust.

    minisgl bench control-plane [--backend rust_hotpath python] [--case NAME ...] [--gate] [--out FILE]

    minisgl bench control-plane --growth [SWEEP ...] [--out DIR]

Prints median, minimum, p90, p95 and p99 of each case in us, beside its bar; the last line of stdout is JSON with the
medians. Refuses a debug build of the extension, and a missing one. `--gate` fails when a bar is missed. The garbage
collector is off while a case runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.control_plane import tree
from benchmark.control_plane.cases import CASES
from benchmark.control_plane.growth import SWEEPS, run_growth
from benchmark.control_plane.timing import measured
from minisgl.bench.report import print_result, public_command
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import BACKENDS, make_control_plane

NAMES = (*CASES, *tree.REFERENCE)
SMALLEST = ControlPlaneConfig(num_pages=1, page_size=1, max_running_requests=1, max_prefill_length=1, context_len=2)


def refusal(backends: Sequence[str]) -> str | None:
    """Why this build cannot be measured."""
    if "rust_hotpath" not in backends:
        return None
    try:
        from minisgl import _rust
    except ImportError as error:
        return f"the extension is missing: {error}"
    profile = _rust.build_info()["profile"]
    if profile != "release":
        return f"the extension is a {profile} build; only release is measured"
    try:
        make_control_plane("rust_hotpath", SMALLEST)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def measure(backend: str, name: str) -> dict[str, float]:
    """Median, minimum and 99th percentile in us over the steps, or operations, of a case."""
    if name in CASES:
        case, repeats, _ = CASES[name]
        return measured(lambda: case(lambda config: make_control_plane(backend, config), repeats[backend]))
    return measured(lambda: tree.times(backend, name, tree.REPEATS[name][backend]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", nargs="+", choices=BACKENDS, default=list(reversed(BACKENDS)), help="which to measure"
    )
    parser.add_argument(
        "--case", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help="which cases to measure"
    )
    parser.add_argument("--gate", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument(
        "--growth",
        nargs="*",
        choices=tuple(SWEEPS),
        metavar="SWEEP",
        help=f"instead of the cases: growth with {', '.join(SWEEPS)} (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="write all figures: a JSON file; with --growth a folder with plots"
    )


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.control_plane", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(args))


def run(options: argparse.Namespace) -> int:
    why = refusal(options.backend)
    if why is not None:
        print(f"benchmark.control_plane: {why}", file=sys.stderr)
        return 2
    if options.growth is not None:
        sweeps = options.growth or list(SWEEPS)
        command = public_command(getattr(options, "arguments", []))
        print_result({"build": "release", "us": run_growth(options.backend, sweeps, options.out, command)})
        return 0
    figures: dict[str, dict[str, dict[str, float]]] = {backend: {} for backend in options.backend}
    missed = 0
    for name in options.case:
        for backend in options.backend:
            found = figures[backend][name] = measure(backend, name)
            bar = (CASES[name].bars if name in CASES else tree.bars(name)).get(backend)
            missed += bar is not None and found["median"] > bar
            text = "" if bar is None else f"  at most {bar:g}: {'missed' if found['median'] > bar else 'met'}"
            columns = "".join(f"{key} {value:10.2f}  " for key, value in found.items())
            print(f"{name:20} {backend:13} {columns}{text}", flush=True)
    medians = {b: {name: found["median"] for name, found in cases.items()} for b, cases in figures.items()}
    if options.out is not None:
        options.out.write_text(json.dumps({"build": "release", "us": figures}, indent=1) + "\n")
    print(json.dumps({"build": "release", "us": medians}))
    return 1 if options.gate and missed else 0


if __name__ == "__main__":
    sys.exit(main())
