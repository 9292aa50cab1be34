"""Compare two configurations of the server, measured in pairs: differences with a confidence interval.

    python -m benchmark.ab --a-revision HEAD~10 --b-revision HEAD -- --engine echo

The configurations may differ in flags, environment or git revision. Flags after -- are those of `minisgl serve` for
both. Every measurement has a fresh server; the variants alternate, and so does their order within a pair, so that drift
of the machine affects both. A run with a failed request is discarded. Variants whose loads differ (`--b-load`) use the
same server for all runs: short runs and many pairs show a difference of a percent.

A revision is a checkout of its own (a git worktree in a temporary folder) with its own extension, built there by cargo;
both are removed at the end, and this checkout is not changed.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.bench.point import PointLoad, measure_point, point_from
from minisgl.bench.report import JSON_HELP, Report, print_result, public_command, table
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.stats import PairedDifference, paired_figures, turns
from minisgl.bench.stopping import Stopped, stoppable
from minisgl.config import ConfigError

Figures = dict[str, float]
Measure = Callable[[ServerProcess], Figures]
MORE_IS_BETTER = ("tok_s", "requests_s", "goodput", "cached_share")
NEITHER = ("steps", "rows_per_step")
CARGO = ("cargo", "build", "--release", "--locked", "-p", "minisgl-py", "--features", "extension-module")
LIBRARIES = ("lib_rust.so", "lib_rust.dylib")
EXTENSION = "_rust.abi3.so"


@dataclass(frozen=True, slots=True)
class Variant:
    """Configuration of the server to compare. `flags` and `load` follow the shared ones of both variants; `env` is
    added to the caller's environment."""

    name: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    revision: str | None = None
    load: tuple[str, ...] = ()

    @property
    def has_own_server(self) -> bool:
        return bool(self.flags or self.env or self.revision)

    def launch(self, shared: Sequence[str], source: Path | None) -> Launch:
        return Launch((*shared, *self.flags), dict(self.env), source)

    def describe(self) -> str:
        parts = [shlex.join(self.flags), *(f"{key}={value}" for key, value in self.env)]
        parts.append("" if self.revision is None else f"revision {self.revision}")
        parts.append(f"load {shlex.join(self.load)}" if self.load else "")
        return ", ".join(part for part in parts if part) or "as it is"


def parse_env(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse NAME=VALUE texts. Raises `ConfigError` for any other text."""
    variables = []
    for text in pairs:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(f"{text}: an environment variable is given as NAME=VALUE")
        variables.append((name, value))
    return tuple(variables)


@contextlib.contextmanager
def sources(variants: Sequence[Variant]) -> Iterator[dict[str, Path | None]]:
    """Yield the `python` folder to run by variant name, `None` for this checkout. Raises `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="minisgl-revisions-") as folder, contextlib.ExitStack() as stack:
        folders: dict[str, Path | None] = {}
        built: dict[str, Path] = {}
        for variant in variants:
            if variant.revision is None:
                folders[variant.name] = None
                continue
            commit = _git("rev-parse", "--verify", f"{variant.revision}^{{commit}}")
            if commit not in built:
                built[commit] = stack.enter_context(_checkout(commit, Path(folder)))
            folders[variant.name] = built[commit]
        yield folders


@contextlib.contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    tree = folder / commit[:12]
    _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        print(f"building the extension of {commit[:12]} ...", file=sys.stderr, flush=True)
        _build(tree, folder / "target")
        yield tree / "python"
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _build(tree: Path, target: Path) -> None:
    """Build a revision's extension. Variants share the `target` folder, so that common crates are compiled once."""
    if not (tree / "Cargo.toml").exists():
        return  # a revision from before the extension
    try:
        _run((*CARGO, "--target-dir", str(target)), tree)
    except FileNotFoundError as error:
        raise ConfigError("cargo is not installed; it builds the extension of a revision") from error
    libraries = [target / "release" / name for name in LIBRARIES if (target / "release" / name).exists()]
    if not libraries:
        raise ConfigError(f"{tree.name}: cargo built no extension")
    shutil.copy(libraries[0], tree / "python" / "minisgl" / EXTENSION)


def _git(*args: str) -> str:
    """Run git in the checkout that contains this file; return its output."""
    return _run(("git", *args), Path(__file__).resolve().parent)


def _run(program: Sequence[str], folder: Path) -> str:
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{shlex.join(program[:3])} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip()


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
        group.add_argument(f"--{letter}-name", default=name, help=f"name in tables (default: {name})")
        group.add_argument(f"--{letter}-flags", default="", metavar="TEXT", help="flags of the server, in one string")
        group.add_argument(f"--{letter}-env", action="append", default=[], metavar="NAME=VALUE", help="environment")
        group.add_argument(f"--{letter}-revision", metavar="REV", help="git revision to build and run")
        group.add_argument(f"--{letter}-load", default="", metavar="TEXT", help="flags added to --load")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each variant (default: 5)")
    parser.add_argument(
        "--load",
        default="",
        metavar="TEXT",
        help="load and workload flags of `minisgl bench serve` for one point, in one string",
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="level of the intervals (default: 0.95)")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="flags of both servers")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with stoppable():
            return run(make_parser().parse_args(arguments), public_command(arguments, "python -m benchmark.ab"))
    except Stopped as stopped:
        return stopped.code
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
            tuple(shlex.split(getattr(args, f"{letter}_load"))),
        )
        for letter in ("a", "b")
    )
    if variants[0].name == variants[1].name:
        raise ConfigError(f"--b-name {variants[1].name}: both variants have this name")
    if args.pairs < 1:
        raise ConfigError(f"--pairs {args.pairs}: must be at least 1")
    if not 0.5 <= args.confidence < 1:
        raise ConfigError(f"--confidence {args.confidence}: must be between 0.5 and 1")
    given = shlex.split(args.load)
    load = point_from(given)
    loads = {variant.name: point_from((*given, *variant.load)) for variant in variants}
    report = None if args.out is None else Report(args.out, "A against B", command=command)
    if any(variant.load for variant in variants):
        if any(variant.has_own_server for variant in variants):
            raise ConfigError("--a-load, --b-load: variants differ in their servers or in their loads, not in both")
        stopped, runs = compare_loads(loads, args.server_flags, args.pairs)
    else:
        stopped, runs = compare(variants, args.server_flags, args.pairs, lambda server: measure_point(server, load))
    if stopped is not None:
        pairs = min(map(len, runs.values()))
        print(f"benchmark.ab: stopped after {pairs} of {args.pairs} pairs", file=sys.stderr, flush=True)
        if not pairs:
            return stopped.code
        runs = {name: found[:pairs] for name, found in runs.items()}
    a, b = (runs[variant.name] for variant in variants)
    differences = paired_figures(a, b, args.confidence)
    print(figures_table(variants, differences))
    result = {
        "bench": "ab",
        "a": variants[0].describe(),
        "b": variants[1].describe(),
        "pairs": len(a),
        "metrics": {name: found.as_dict() for name, found in differences.items()},
    }
    if report is not None:
        _write(report, variants, args.server_flags, load, runs, differences, result)
    if args.json:
        print_result(result)
    return 0 if stopped is None else stopped.code


Runs = dict[str, list[Figures]]


def _gathered(names: Sequence[str], pairs: int, measure_one: Callable[[str], Figures], runs: Runs) -> None:
    """Fill `runs`, pair by pair, showing progress by a bar on a terminal or else by lines. Raises `Stopped`."""
    with tqdm(total=len(names) * pairs, desc="ab", unit="run", disable=None) as bar:
        for pair, name in turns(list(names), pairs):
            if bar.disable:
                print(f"benchmark.ab: pair {pair + 1} of {pairs}: {name}", file=sys.stderr, flush=True)
            runs[name].append(measure_one(name))
            bar.update()


def compare(
    variants: tuple[Variant, ...], shared: Sequence[str], pairs: int, measure_one: Measure
) -> tuple[Stopped | None, Runs]:
    """Measure all pairs. Return the reason for an early stop (`None`: none), and the figures of each run by variant,
    pair by pair. Raises `ConfigError` if a server fails."""
    of_name = {variant.name: variant for variant in variants}
    runs: Runs = {name: [] for name in of_name}

    def one(name: str) -> Figures:
        server = ServerProcess(of_name[name].launch(shared, trees[name]))
        try:
            with server:
                found = measure_one(server)
        except ServerFailed as error:
            raise ConfigError(f"variant {name}: {error}") from error
        if server.exit_code or server.left_behind:
            left = ", ".join(server.left_behind) or "nothing"
            raise ConfigError(f"variant {name}: exit code {server.exit_code}, left behind: {left}")
        return {**found, "start_s": server.start_s, "stop_s": server.stop_s}

    try:
        with sources(variants) as trees:
            _gathered(list(of_name), pairs, one, runs)
    except Stopped as stopped:
        return stopped, runs
    return None, runs


def compare_loads(loads: Mapping[str, PointLoad], flags: Sequence[str], pairs: int) -> tuple[Stopped | None, Runs]:
    """Measure all pairs on one server that gets the loads in turn; return what `compare` does. Raises `ConfigError`."""
    runs: Runs = {name: [] for name in loads}
    try:
        with ServerProcess(Launch(tuple(flags))) as server:
            _gathered(list(loads), pairs, lambda name: measure_point(server, loads[name]), runs)
    except Stopped as stopped:
        return stopped, runs
    except ServerFailed as error:
        raise ConfigError(f"the server: {error}") from error
    return None, runs


def verdict(name: str, difference: PairedDifference) -> str:
    """Return the verdict that a figure's interval supports; one difference among many figures may be chance."""
    shown = difference.ratio or difference.difference
    if not shown.excludes_zero:
        return "no difference seen"
    if name in NEITHER:
        return "differs"
    more_is_better = any(part in name for part in MORE_IS_BETTER)
    return "better" if (shown.estimate > 0) == more_is_better else "worse"


def figures_table(variants: tuple[Variant, ...], differences: Mapping[str, PairedDifference]) -> str:
    """Return the table of B against A: means, the paired ratio (or difference) with its interval, and the verdict."""
    rows = [(name, one.mean_a, one.mean_b, str(one), verdict(name, one)) for name, one in differences.items()]
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
        f"{first.num_pairs} pairs, a fresh server for each run, in alternating order. Geometric means where all are "
        "above 0, else arithmetic ones; the difference is that of the pairs, with Student's t interval at "
        f"{100 * first.confidence:g} %.",
        figures_table(variants, differences),
    )
    report.write({"result": result, "load": load.describe(), "runs": dict(runs)})


if __name__ == "__main__":
    sys.exit(main())
