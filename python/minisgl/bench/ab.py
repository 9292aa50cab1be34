"""The command `minisgl bench ab`: measures `MINISGL_CPU_BACKEND=python` against `rust_hotpath` in pairs of runs, with a
verdict.

The first part is the step loop over a simulated engine whose steps take no time, where the scheduler matters most. The
second part is the embedded model over HTTP, in one real server for each scheduler; the servers take turns.
Invariants: the order alternates; both runs of a pair get the same prompts, and no two pairs share prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.load import Server, server_counters
from minisgl.bench.offline_run import OfflineJob, run_job
from minisgl.bench.point import measure_point, point_from
from minisgl.bench.report import JSON_HELP, Report, print_result, public_command, table
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.stats import PairedDifference, paired_difference, turns
from minisgl.bench.stopping import Stopped
from minisgl.config import ConfigError, EngineConfig

VARIABLE, FRONTEND = "MINISGL_CPU_BACKEND", "MINISGL_FRONTEND"
LOAD = ("--concurrency", "4", "--warmup-requests", "0", "--input-len", "16", "32", "--output-len", "16", "16")
PERCENTILES = ("p50", "p95", "p99")
COLUMNS = {
    "tok/s": "output_tok_s",
    **{f"{name.upper()} {which} ms": f"{name}_{which}_ms" for name in ("ttft", "itl") for which in PERCENTILES},
    **{f"step {which} us": f"step_{which}_us" for which in PERCENTILES},
}
Figures = dict[str, float]


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "ab",
        help=f"two schedulers by {VARIABLE}: a simulated engine, then the embedded model over HTTP",
        description=f"A/B of the scheduler by {VARIABLE}: pairs of runs in alternating order, a table of medians and a "
        "verdict with its interval; first with a simulated engine whose steps take no time, then with the embedded "
        "model over HTTP. The ratio of a verdict is the mean of the pairs' ratios, not that of the medians. "
        "Takes one to two minutes.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--backends", nargs="+", default=["python", "rust_hotpath"], metavar="NAME",
        help=f"values of {VARIABLE}; the first is the baseline of the others (default: python rust_hotpath)",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, default=6, help="runs of each scheduler in each part (default: 6)")
    parser.add_argument("--duration", type=float, default=2.0, metavar="S", help="seconds of an HTTP run (default: 2)")
    parser.add_argument(
        "--frontends", nargs="+", choices=("rust", "python"), default=[],
        help="front ends to combine with each scheduler over HTTP (default: the server's own)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help=f"{JSON_HELP}; its ratios are less 1")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for raw.json and a report")
    return parser


def run(args: argparse.Namespace) -> int:
    names = list(dict.fromkeys(args.backends))
    if len(names) < 2:
        raise ConfigError(f"--backends {' '.join(args.backends)}: must be two different schedulers")
    if args.pairs < 1:
        raise ConfigError(f"--pairs {args.pairs}: must be at least 1")
    report = (
        None if args.out is None else Report(args.out, "A/B of the scheduler", command=public_command(sys.argv[2:]))
    )
    servers = {
        f"{name}, front end {front_end}" if front_end else name: {
            VARIABLE: name,
            **({FRONTEND: front_end} if front_end else {}),
        }
        for name in names
        for front_end in args.frontends or [""]
    }
    parts = []
    measures: dict[str, Callable[[str], dict[str, list[Figures]]]] = {
        "simulated engine, step loop": lambda title: _simulated(Turns(title, names, args.pairs)),
        "smollm2 over HTTP": lambda title: _served(Turns(title, list(servers), args.pairs), args.duration, servers),
    }
    code = 0
    for title, measure in measures.items():
        try:
            part = Part(title, measure(title))
        except StoppedWith as stopped:
            code = stopped.code
            pairs = min(map(len, stopped.runs.values()))
            part = Part(f"{title}, stopped after {pairs} of {args.pairs} pairs", stopped.runs)
        parts.append(part)
        texts = part.table(), "\n".join(part.verdicts())
        print(f"{part.title}\n\n{texts[0]}\n\n{texts[1]}\n", flush=True)
        if report is not None:
            report.section(part.title, *texts)
            report.write({"runs": {one.title: one.runs for one in parts}})
        if code:
            break
    if args.json:
        print_result({"bench": "ab", "parts": [part.as_dict() for part in parts]})
    return code


@dataclass(frozen=True, slots=True)
class Turns:
    """The schedulers of a part of `bench ab`, its number of pairs, and its title in progress lines."""

    title: str
    names: Sequence[str]
    pairs: int

    def measure(self, measure_run: Callable[[str, int], Figures]) -> dict[str, list[Figures]]:
        """Return the figures of `measure_run(name, pair)` by scheduler. Prints a progress line for each."""
        found: dict[str, list[Figures]] = {name: [] for name in self.names}
        try:
            for pair, name in turns(self.names, self.pairs):
                figures = measure_run(name, pair)
                found[name].append(figures)
                said = f"pair {pair + 1} of {self.pairs}: {name}: {figures['output_tok_s']:,.0f} tok/s"
                print(f"bench ab: {self.title}: {said}", file=sys.stderr, flush=True)
        except Stopped as stopped:
            if not (whole := min(map(len, found.values()))):
                raise
            raise StoppedWith(stopped, {name: runs[:whole] for name, runs in found.items()}) from stopped
        return found


class StoppedWith(Stopped):
    """A stop by a signal, with the figures of the complete pairs."""

    def __init__(self, stopped: Stopped, runs: Mapping[str, Sequence[Figures]]) -> None:
        super().__init__(stopped.code - 128)
        self.runs = runs


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the A/B benchmark: for each scheduler, the figures of its runs, one run a pair."""

    title: str
    runs: Mapping[str, Sequence[Figures]]

    def medians(self) -> dict[str, Figures]:
        return {
            name: {key: statistics.median(one[key] for one in runs) for key in COLUMNS.values() if key in runs[0]}
            for name, runs in self.runs.items()
        }

    def table(self) -> str:
        medians = self.medians()
        shown = {head: key for head, key in COLUMNS.items() if any(key in one for one in medians.values())}
        rows = [(name, *(one.get(key) for key in shown.values())) for name, one in medians.items()]
        return table(("scheduler", *shown), rows)

    def differences(self) -> dict[str, PairedDifference]:
        """Return the difference in tok/s between the first scheduler and each other one, by its name."""
        (_, base), *others = ((name, [one["output_tok_s"] for one in runs]) for name, runs in self.runs.items())
        return {name: paired_difference(base, values) for name, values in others}

    def verdicts(self) -> list[str]:
        return [verdict(name, difference) for name, difference in self.differences().items()]

    def as_dict(self) -> dict[str, Any]:
        against = {name: difference.as_dict() for name, difference in self.differences().items()}
        return {"part": self.title, "medians": self.medians(), "against": against, "verdicts": self.verdicts()}


def verdict(name: str, difference: PairedDifference) -> str:
    """Return the ratio of tok/s with its interval as a sentence; it claims no difference if the interval has 1."""
    assert difference.ratio is not None  # throughput is above 0
    times, low, high = (1 + value for value in (difference.ratio.estimate, difference.ratio.low, difference.ratio.high))
    interval = f"95 % interval {low:.2f} to {high:.2f}, {difference.num_pairs} pairs"
    if difference.num_pairs == 1:
        return f"{name}: {times:.2f} times the tok/s; one pair has no interval, so no difference can be seen"
    if not difference.ratio.excludes_zero:
        return f"{name}: no difference can be seen in tok/s ({times:.2f} times, {interval})"
    return f"{name}: {times:.2f} times the tok/s ({interval})"


def _simulated(ask: Turns) -> dict[str, list[Figures]]:
    """Measure the step loop in this process, with 256 sequences that all start at once."""

    def one(name: str, pair: int) -> Figures:
        engine = EngineConfig(
            engine="sim", sim_profile="null", cpu_backend=name, max_running_requests=256, num_pages=256 * 16
        )
        job = OfflineJob(engine=engine, num_sequences=256, input_len=(100, 100), output_len=(128, 128))
        result = run_job(job)
        steps = {f"step_{which}_us": result["step_us"]["schedule"][which] for which in PERCENTILES}
        return {"output_tok_s": result["output_tok_s"], **steps}

    return ask.measure(one)


def _served(ask: Turns, duration_s: float, environments: Mapping[str, Mapping[str, str]]) -> dict[str, list[Figures]]:
    """Measure a server in each of `environments`. A first round warms up; the percentiles of a step are over all
    rounds."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for name in ask.names:
            try:
                launch = Launch(("--model", "smollm2"), environments[name])
                servers[name] = stack.enter_context(ServerProcess(launch))
            except ServerFailed as error:
                variables = " ".join(f"{key}={value}" for key, value in environments[name].items())
                raise ConfigError(f"{variables}: {error}") from error

        def one(name: str, pair: int) -> Figures:
            flags = (*LOAD, "--duration", str(duration_s), "--seed", str(pair + 1))
            return measure_point(servers[name], point_from(flags))

        for name in ask.names:
            one(name, -1)
        runs = ask.measure(one)
        for name, server in servers.items():
            said = server_counters(Server(server.url, server.model))
            steps = {} if said is None else {f"step_{key}_us": said["schedule_us"][key] for key in PERCENTILES}
            runs[name] = [{**figures, **steps} for figures in runs[name]]
    return runs
