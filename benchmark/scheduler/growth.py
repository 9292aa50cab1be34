"""How the time of a step grows: with the batch, the context, the cached tree and the pool; both schedulers.

    python -m benchmark.scheduler.growth [SWEEP ...] [--backend rust_hotpath python] [--out DIR]

A decode step is to be O(batch) whatever the cache holds and however long the contexts are; an eviction O(1) to O(log n)
per page. Plots are logarithmic on both axes.

In each sweep one size changes and everything else stays; the cases assert their load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.environment import environment
from minisgl.bench.plots import Series, line_plot
from minisgl.bench.report import print_result, public_command, table, write_json, write_report
from minisgl.bench.scheduler import refusal
from minisgl.bench.scheduler_cases import SMALLEST_POOL, Case, churn, decode, decode_256_evict_16, measured
from minisgl.scheduler.backend import BACKENDS, make_control_plane

Figures = dict[str, float]
COLUMNS = ("median", "min")
REPEATS = {"rust_hotpath": 400, "python": 60}
ROUNDS = range(3, 7)  # of each point: until the median of one lies within `STEADY` of the fastest step of all
STEADY = 1.25

HOW = (
    "Schedule + commit of one step as seen from Python, in us, without an engine: median of "
    f"{REPEATS['rust_hotpath']} steps (Rust) and {REPEATS['python']} (Python), and the fastest.\n"
    f"Other work on the machine only adds: of at least {ROUNDS.start} rounds the one with the lowest median counts, of "
    f"up to {ROUNDS.stop - 1} while that lies above {STEADY} times the fastest step.\n"
    "All figures are in `raw.json`. Both axes of the plots are logarithmic; the bands reach down to the fastest step."
)


@dataclass(frozen=True)
class Sweep:
    """`make` gives the case of a size; at most `max_repeats(size)` steps of it can be timed."""

    title: str
    unit: str
    sizes: tuple[int, ...]
    make: Callable[[int], Case]
    max_repeats: Callable[[int], int] = lambda size: 1 << 30


SWEEPS = {
    "batch": Sweep(
        "decode step against its rows (context 512, page size 1)",
        "rows",
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        decode,
    ),
    "context": Sweep(
        "decode step of 256 rows against their context (page size 16)",
        "tokens of each row",
        (128, 512, 2048, 8192, 32_768),
        lambda context: decode(256, context, 16),
    ),
    "tree": Sweep(
        "decode step of 256 rows with 16 evictions against the cached tree (page size 16)",
        "leaves",
        (8192, 16_384, 32_768, 65_536, 131_072, 262_144),
        decode_256_evict_16,
        lambda leaves: leaves // 32,  # 16 of them go in a step
    ),
    "pool": Sweep(
        "256 rows, one ends and one of 200 tokens comes in each step, against the pool, full of cache (page size 1)",
        "pages",
        (SMALLEST_POOL, 250_000, 500_000, 1_000_000, 2_000_000),
        churn,
    ),
}


def run_growth(backends: list[str], names: list[str], out: Path | None, command: str) -> dict[str, Any]:
    """Measures the sweeps; writes raw.json, plots and a README into `out`. Medians in us, by sweep and backend."""
    start = environment()
    found: dict[str, dict[str, dict[int, Figures]]] = {}
    for name in names:
        found[name] = {backend: {} for backend in backends}
        for size in SWEEPS[name].sizes:
            for backend in backends:
                found[name][backend][size] = figures = measure(SWEEPS[name], size, backend)
                columns = "".join(f"{key} {value:10.2f}  " for key, value in figures.items())
                print(f"{name:8} {size:9} {backend:13} {columns}", flush=True)
    if out is not None:
        write_json(out / "raw.json", {"environment": start, "us": found})
        sections = [("How", HOW)] + [(SWEEPS[name].title, section(out, name, found[name])) for name in names]
        write_report(out, "Growth of the schedulers' steps", sections, command=command, record=start)
    return {
        name: {
            backend: {size: figures["median"] for size, figures in sizes.items()} for backend, sizes in of_name.items()
        }
        for name, of_name in found.items()
    }


def measure(sweep: Sweep, size: int, backend: str) -> Figures:
    case = sweep.make(size)
    repeats = min(REPEATS[backend], sweep.max_repeats(size))
    rounds: list[Figures] = []
    while len(rounds) < ROUNDS.stop - 1:
        rounds.append(measured(lambda: case(lambda config: make_control_plane(backend, config), repeats)))
        steady = min(one["median"] for one in rounds) <= STEADY * min(one["min"] for one in rounds)
        if len(rounds) >= ROUNDS.start and steady:
            break
    return min(rounds, key=lambda figures: figures["median"])


def section(out: Path, name: str, of_name: dict[str, dict[int, Figures]]) -> str:
    sweep = SWEEPS[name]
    series = [
        Series(backend, list(sizes), medians := column(sizes, "median"), column(sizes, "min"), medians)
        for backend, sizes in of_name.items()
    ]
    plot = line_plot(
        out / f"{name}.png",
        series,
        title=sweep.title,
        x_label=sweep.unit,
        y_label="us, schedule + commit, median",
        log_x=True,
        log_y=True,
    )
    head = [sweep.unit, *(f"{backend}, {key}, us" for backend in of_name for key in COLUMNS)]
    rows = [
        [size, *(sizes[size][key] for sizes in of_name.values() for key in COLUMNS)]
        for size in next(iter(of_name.values()))
    ]
    return f"{table(head, rows)}\n\n{plot}"


def column(sizes: dict[int, Figures], key: str) -> list[float]:
    return [figures[key] for figures in sizes.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="benchmark.scheduler.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"{', '.join(SWEEPS)} (default: all)")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(reversed(BACKENDS)))
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json, plots and a report")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.sweeps if name not in SWEEPS]:
        parser.error(f"{unknown[0]}: must be one of {', '.join(SWEEPS)}")
    if (why := refusal(args.backend)) is not None:
        print(f"benchmark.scheduler.growth: {why}", file=sys.stderr)
        return 2
    command = public_command(arguments, "python -m benchmark.scheduler.growth")
    print_result({"build": "release", "us": run_growth(args.backend, args.sweeps or list(SWEEPS), args.out, command)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
