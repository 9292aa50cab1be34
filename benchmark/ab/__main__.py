"""Two configurations of the server, measured in pairs: differences with a confidence interval.

    python -m benchmark.ab --a-revision HEAD~10 --b-revision HEAD -- --engine echo

Two servers may differ in flags, environment or git revision. Flags after -- are those of `minisgl serve` for both.
Every measurement has a fresh server; the variants alternate, and who goes first alternates too, so that drift of the
machine hits both. A run with a failed request is no result.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.ab.point import PointLoad, measure_point, point_from
from benchmark.ab.variants import Variant, parse_env, sources
from minisgl.bench.plots import bar_breakdown
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.server_process import ServerFailed, ServerProcess
from minisgl.bench.stats import PairedDifference, paired_difference
from minisgl.config import ConfigError

Figures = dict[str, float]
Measure = Callable[[ServerProcess], Figures]
MORE_IS_BETTER = ("tok_s", "requests_s", "goodput", "cached_share")
NEITHER = ("steps", "rows_per_step")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.ab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for letter in ("a", "b"):
        name = letter.upper()
        group = parser.add_argument_group(f"variant {name}")
        group.add_argument(f"--{letter}-name", default=name, help=f"its name in tables (default: {name})")
        group.add_argument(f"--{letter}-flags", default="", metavar="TEXT", help="flags of its server, in one text")
        group.add_argument(f"--{letter}-env", action="append", default=[], metavar="NAME=VALUE", help="its environment")
        group.add_argument(f"--{letter}-revision", metavar="REV", help="git revision to build and run")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each variant (default: 5)")
    parser.add_argument(
        "--load",
        default="",
        metavar="TEXT",
        help="load and workload flags of `minisgl bench serve`, one point, in one text",
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (default: 0.95)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="flags of both servers")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return run(make_parser().parse_args(arguments), public_command(arguments, "python -m benchmark.ab"))
    except ConfigError as error:
        print(f"benchmark.ab: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, command: str) -> int:
    variants = tuple(
        Variant(
            getattr(args, f"{letter}_name"),
            tuple(shlex.split(getattr(args, f"{letter}_flags"))),
            parse_env(getattr(args, f"{letter}_env")),
            getattr(args, f"{letter}_revision"),
        )
        for letter in ("a", "b")
    )
    if variants[0].name == variants[1].name:
        raise ConfigError(f"--b-name {variants[1].name}: both variants have this name")
    if args.pairs < 1:
        raise ConfigError(f"--pairs {args.pairs}: must be at least 1")
    if not 0.5 <= args.confidence < 1:
        raise ConfigError(f"--confidence {args.confidence}: must be between 0.5 and 1")
    load = point_from(shlex.split(args.load))
    report = None if args.out is None else Report(args.out, "A against B", command=command)
    runs = compare(variants, args.server_flags, args.pairs, lambda server: measure_point(server, load))
    differences = paired(variants, runs, args.confidence)
    print(figures_table(variants, differences))
    result = {
        "bench": "ab",
        "a": variants[0].describe(),
        "b": variants[1].describe(),
        "pairs": args.pairs,
        "metrics": {name: found.as_dict() for name, found in differences.items()},
    }
    if report is not None:
        _write(report, variants, args.server_flags, load, runs, differences, result)
    print_result(result)
    return 0


def compare(
    variants: tuple[Variant, ...], shared: Sequence[str], pairs: int, measure_one: Measure
) -> dict[str, list[Figures]]:
    """The figures of each run by variant, pair by pair. Raises `ConfigError`."""
    runs: dict[str, list[Figures]] = {variant.name: [] for variant in variants}
    with sources(variants) as trees, tqdm(total=len(variants) * pairs, desc="ab", unit="run", disable=None) as bar:
        for pair in range(pairs):
            for variant in variants if pair % 2 == 0 else reversed(variants):
                server = ServerProcess(variant.launch(shared, trees[variant.name]))
                try:
                    with server:
                        figures = measure_one(server)
                except ServerFailed as error:
                    raise ConfigError(f"variant {variant.name}: {error}") from error
                if server.exit_code or server.left_behind:
                    left = ", ".join(server.left_behind) or "nothing"
                    raise ConfigError(f"variant {variant.name}: exit code {server.exit_code}, left behind: {left}")
                runs[variant.name].append({**figures, "start_s": server.start_s, "stop_s": server.stop_s})
                bar.update()
    return runs


def paired(
    variants: tuple[Variant, ...], runs: Mapping[str, Sequence[Figures]], confidence: float
) -> dict[str, PairedDifference]:
    """By figure, for those that every run has."""
    a, b = (runs[variant.name] for variant in variants)
    names = [name for name in a[0] if all(name in run for run in (*a, *b))]
    return {name: paired_difference([run[name] for run in a], [run[name] for run in b], confidence) for name in names}


def verdict(name: str, found: PairedDifference) -> str:
    """What the interval that is shown says; of many figures, one that stands alone may be chance."""
    shown = found.ratio or found.difference
    if not shown.excludes_zero:
        return "no difference seen"
    if name in NEITHER:
        return "differs"
    more_is_better = any(part in name for part in MORE_IS_BETTER)
    return "better" if (shown.estimate > 0) == more_is_better else "worse"


def figures_table(variants: tuple[Variant, ...], differences: Mapping[str, PairedDifference]) -> str:
    """B against A: medians, the paired difference with its interval, what it says."""
    rows = []
    for name, found in differences.items():
        shown = found.ratio or found.difference
        scale, unit = (100.0, " %") if found.ratio else (1.0, "")
        low, high = (f"{scale * value:+.1f}" for value in (shown.low, shown.high))
        change = f"{scale * shown.estimate:+.1f}{unit} [{low}, {high}]"
        rows.append((name, found.median_a, found.median_b, change, verdict(name, found)))
    a, b = (variant.name for variant in variants)
    return table(("figure", a, b, f"{b} against {a}", "verdict"), rows)


def _write(
    report: Report,
    variants: tuple[Variant, ...],
    shared: Sequence[str],
    load: PointLoad,
    runs: Mapping[str, Sequence[Figures]],
    differences: Mapping[str, PairedDifference],
    result: Mapping[str, Any],
) -> None:
    first = next(iter(differences.values()))
    lines = [f"- {variant.name}: `{variant.describe()}`" for variant in variants]
    lines += [f"- both: `{shlex.join(shared)}`"] if shared else []
    report.section("Variants", "\n".join([*lines, f"- load: `{load.describe()}`"]))
    report.section(
        "Figures",
        f"{first.num_pairs} pairs, a fresh server for each run, in alternating order. Medians; the difference is that "
        "of the pairs (geometric mean of the ratios where all are above 0), with Student's t interval at "
        f"{100 * first.confidence:g} %.",
        figures_table(variants, differences),
    )
    cpu = {
        name: {
            figure.removesuffix("_cpu_us_per_token"): sum(run[figure] for run in of_one) / len(of_one)
            for figure in of_one[0]
            if figure.endswith("_cpu_us_per_token")
        }
        for name, of_one in runs.items()
    }
    if all(cpu.values()):
        plot = bar_breakdown(report.folder / "cpu.png", cpu, title="CPU per token by process", y_label="us")
        report.section("CPU", plot)
    report.write({"result": result, "load": load.describe(), "runs": dict(runs)})


if __name__ == "__main__":
    sys.exit(main())
