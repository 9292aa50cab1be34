"""`minisgl bench ab`: two configurations of the server, measured in pairs.

Keeps true: every measurement has a fresh server; the arms alternate, and who goes first alternates too, so that drift
of the machine hits both; a run with a failed request is no result.
Doesn't know: how a server is measured (`measure`), statistics.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.bench.arms import Arm, parse_env, sources
from minisgl.bench.measure import Load, load_from, measure
from minisgl.bench.plots import bar_breakdown
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.server_process import ServerFailed, ServerProcess
from minisgl.bench.stats import PairedDifference, paired_difference
from minisgl.config import ConfigError

Figures = dict[str, float]
Measure = Callable[[ServerProcess], Figures]
MORE_IS_BETTER = ("tok_s", "requests_s", "goodput")
NEITHER = ("steps", "rows_per_step")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "ab",
        help="two configurations in pairs: differences with a confidence interval",
        description="Compare two servers that differ in flags, environment or git revision. Each measurement starts a "
        "fresh server; arms alternate. Flags after -- are those of `minisgl serve` for both.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    for letter in ("a", "b"):
        group = parser.add_argument_group(f"arm {letter.upper()}")
        group.add_argument(f"--{letter}-name", default=letter.upper(), help="its name in tables")
        group.add_argument(f"--{letter}-flags", default="", metavar="TEXT", help="flags of its server, in one text")
        group.add_argument(f"--{letter}-env", action="append", default=[], metavar="NAME=VALUE", help="its environment")
        group.add_argument(f"--{letter}-revision", metavar="REV", help="git revision to build and run")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each arm")
    parser.add_argument(
        "--load",
        default="",
        metavar="TEXT",
        help="load and workload flags of `minisgl bench serve`, one point, in one text",
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="flags of both servers")
    return parser


def run(args: argparse.Namespace) -> int:
    arms = tuple(
        Arm(
            getattr(args, f"{letter}_name"),
            tuple(shlex.split(getattr(args, f"{letter}_flags"))),
            parse_env(getattr(args, f"{letter}_env")),
            getattr(args, f"{letter}_revision"),
        )
        for letter in ("a", "b")
    )
    if arms[0].name == arms[1].name:
        raise ConfigError(f"--b-name {arms[1].name}: both arms have this name")
    if args.pairs < 1:
        raise ConfigError(f"--pairs {args.pairs}: must be at least 1")
    if not 0.5 <= args.confidence < 1:
        raise ConfigError(f"--confidence {args.confidence}: must be between 0.5 and 1")
    load = load_from(shlex.split(args.load))
    report = None if args.out is None else Report(args.out, "A against B", command=public_command(args.arguments))
    runs = compare(arms, args.server_flags, args.pairs, lambda server: measure(server, load))
    differences = paired(arms, runs, args.confidence)
    print(figures_table(arms, differences))
    result = {
        "bench": "ab",
        "a": arms[0].describe(),
        "b": arms[1].describe(),
        "pairs": args.pairs,
        "metrics": {name: found.as_dict() for name, found in differences.items()},
    }
    if report is not None:
        _write(report, arms, args.server_flags, load, runs, differences, result)
    print_result(result)
    return 0


def compare(arms: tuple[Arm, ...], shared: Sequence[str], pairs: int, measure_one: Measure) -> dict[str, list[Figures]]:
    """The figures of each run by arm, pair by pair. Raises `ConfigError`."""
    runs: dict[str, list[Figures]] = {arm.name: [] for arm in arms}
    with sources(arms) as trees, tqdm(total=2 * pairs, desc="ab", unit="run", disable=None) as bar:
        for pair in range(pairs):
            for arm in arms if pair % 2 == 0 else reversed(arms):
                server = ServerProcess(arm.launch(shared, trees[arm.name]))
                try:
                    with server:
                        figures = measure_one(server)
                except ServerFailed as error:
                    raise ConfigError(f"arm {arm.name}: {error}") from error
                if server.exit_code or server.left_behind:
                    left = ", ".join(server.left_behind) or "nothing"
                    raise ConfigError(f"arm {arm.name}: exit code {server.exit_code}, left behind: {left}")
                runs[arm.name].append({**figures, "start_s": server.start_s, "stop_s": server.stop_s})
                bar.update()
    return runs


def paired(
    arms: tuple[Arm, ...], runs: Mapping[str, Sequence[Figures]], confidence: float
) -> dict[str, PairedDifference]:
    """By figure, for those that every run has."""
    a, b = (runs[arm.name] for arm in arms)
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


def figures_table(arms: tuple[Arm, ...], differences: Mapping[str, PairedDifference]) -> str:
    """B against A: medians, the paired difference with its interval, what it says."""
    rows = []
    for name, found in differences.items():
        shown = found.ratio or found.difference
        scale, unit = (100.0, " %") if found.ratio else (1.0, "")
        low, high = (f"{scale * value:+.1f}" for value in (shown.low, shown.high))
        change = f"{scale * shown.estimate:+.1f}{unit} [{low}, {high}]"
        rows.append((name, found.median_a, found.median_b, change, verdict(name, found)))
    return table(("figure", arms[0].name, arms[1].name, f"{arms[1].name} against {arms[0].name}", "verdict"), rows)


def _write(
    report: Report,
    arms: tuple[Arm, ...],
    shared: Sequence[str],
    load: Load,
    runs: Mapping[str, Sequence[Figures]],
    differences: Mapping[str, PairedDifference],
    result: Mapping[str, Any],
) -> None:
    first = next(iter(differences.values()))
    lines = [f"- {arm.name}: `{arm.describe()}`" for arm in arms]
    lines += [f"- both: `{shlex.join(shared)}`"] if shared else []
    report.section("Arms", "\n".join([*lines, f"- load: `{load.describe()}`"]))
    report.section(
        "Figures",
        f"{first.num_pairs} pairs, a fresh server for each run, in alternating order. Medians; the difference is that "
        "of the pairs (geometric mean of the ratios where all are above 0), with Student's t interval at "
        f"{100 * first.confidence:g} %.",
        figures_table(arms, differences),
    )
    cpu = {
        arm.name: {
            name.removesuffix("_cpu_us_per_token"): sum(run[name] for run in runs[arm.name]) / len(runs[arm.name])
            for name in runs[arm.name][0]
            if name.endswith("_cpu_us_per_token")
        }
        for arm in arms
    }
    if all(cpu.values()):
        plot = bar_breakdown(report.folder / "cpu.png", cpu, title="CPU per token by process", y_label="us")
        report.section("CPU", plot)
    report.write({"result": result, "load": load.describe(), "runs": dict(runs)})
