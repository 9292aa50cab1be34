"""The same load through `python` and `rust_hotpath`, on several profiles: what the choice of a scheduler changes.

    python -m benchmark.online.schedulers --out FOLDER [--pairs 6] [--profile NAME ...]

Each profile is measured as `benchmark.ab` does: a fresh server for every run, variants in alternating order, paired
differences. Writes raw.json and a report; the last line of stdout is JSON. The simulated profiles read a tokenizer: the
embedded one, or that of the folder --tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.ab.__main__ import Figures, compare, figures_table, paired
from benchmark.ab.point import measure_point, point_from
from benchmark.ab.variants import Variant
from minisgl.bench.plots import bar_breakdown
from minisgl.bench.report import Report, print_result, read_raw, table
from minisgl.bench.stats import Interval, PairedDifference

VARIANTS = tuple(Variant(name, ("--cpu-backend", name)) for name in ("python", "rust_hotpath"))
SUMMARY = ("output_tok_s", "ttft_p99_ms", "itl_p99_ms", "scheduler_us_per_step", "engine_cpu_us_per_token")
PARTS = ("schedule", "commit", "receive", "launch", "wait", "send")


class Profile(NamedTuple):
    flags: tuple[str, ...]
    load: str  # flags of `minisgl bench serve`


def _sim(profile: str, *flags: str) -> tuple[str, ...]:
    return ("--engine", "sim", "--sim-profile", profile, "--max-running-requests", "512", *flags)


CHAT = "--input-len 200 200 --output-len 128 128"
PROFILES: dict[str, Profile] = {
    "null, 64 clients": Profile(_sim("null"), f"--concurrency 64 --num-requests 768 {CHAT}"),
    "null, 256 clients": Profile(_sim("null"), f"--concurrency 256 --num-requests 1536 {CHAT}"),
    "null, 256 clients, mixed chats": Profile(
        _sim("null"), "--concurrency 256 --num-requests 1536 --workload chat --warmup-requests 256"
    ),
    "null, 100 requests a second": Profile(_sim("null"), f"--rate 100 --num-requests 600 {CHAT}"),
    "qwen3-0.6b-h200, 256 clients": Profile(
        _sim("qwen3-0.6b-h200"), f"--concurrency 256 --num-requests 1024 --warmup-requests 256 {CHAT}"
    ),
    "qwen3-8b-h200, 256 clients": Profile(
        _sim("qwen3-8b-h200"), f"--concurrency 256 --num-requests 768 --warmup-requests 256 {CHAT}"
    ),
    "qwen3-8b-h200, 40 requests a second": Profile(_sim("qwen3-8b-h200"), f"--rate 40 --num-requests 240 {CHAT}"),
    "echo, 32 clients": Profile(
        ("--engine", "echo", "--max-running-requests", "32"),
        "--concurrency 32 --num-requests 96 --input-len 40 40 --output-len 64 64",
    ),
    "smollm2, 8 clients": Profile(
        ("--model", "smollm2", "--max-running-requests", "8"),
        "--concurrency 8 --num-requests 16 --warmup-requests 8 --input-len 40 40 --output-len 24 24",
    ),
}


def run_profile(profile: Profile, tokenizer: str, pairs: int) -> dict[str, list[Figures]]:
    model = ("--model", tokenizer) if "sim" in profile.flags else ()
    load = point_from(profile.load.split())
    return compare(VARIANTS, (*profile.flags, *model), pairs, lambda server: measure_point(server, load))


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.online.schedulers", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for raw.json and README.md")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument(
        "--again", action="store_true", help="write the report of FOLDER/raw.json again; measure nothing"
    )
    parser.add_argument("--profile", nargs="+", choices=tuple(PROFILES), default=list(PROFILES))
    parser.add_argument("--tokenizer", default="smollm2")
    options = parser.parse_args(args)
    if options.again:
        return _again(options.out)
    command = f"python -m benchmark.online.schedulers --pairs {options.pairs} --out FOLDER"
    report = Report(options.out, "Scheduler by scheduler", command=command)
    runs, found = {}, {}
    for name in options.profile:
        print(name, file=sys.stderr, flush=True)
        runs[name] = run_profile(PROFILES[name], options.tokenizer, options.pairs)
        found[name] = paired(VARIANTS, runs[name], 0.95)
        print(f"\n{name}\n\n{figures_table(VARIANTS, found[name])}", flush=True)
        _write(report, runs, found, options.pairs)  # kept, whatever comes later
    print_result({"benchmark": "schedulers", "profiles": {name: _short(one) for name, one in found.items()}})
    return 0


def _again(folder: Path) -> int:
    raw = read_raw(folder)
    report = Report(folder, raw["title"], command=raw["command"])
    report.environment = raw["environment"]
    runs = raw["runs"]
    found = {name: paired(VARIANTS, by_variant, 0.95) for name, by_variant in runs.items()}
    _write(report, runs, found, len(next(iter(runs.values()))[VARIANTS[0].name]))
    return 0


def _short(found: Mapping[str, PairedDifference]) -> dict[str, Any]:
    return {name: asdict(found[name].ratio or found[name].difference) for name in SUMMARY if name in found}


def _percent(found: PairedDifference | None) -> str:
    if found is None or found.ratio is None:
        return ""
    ratio: Interval = found.ratio
    return f"{100 * ratio.estimate:+.0f} % [{100 * ratio.low:+.0f}, {100 * ratio.high:+.0f}]"


def _write(
    report: Report,
    runs: Mapping[str, Mapping[str, Sequence[Figures]]],
    found: Mapping[str, Mapping[str, PairedDifference]],
    pairs: int,
) -> None:
    report.clear()
    figures = (*SUMMARY, "start_s", "stop_s")
    rows = [(name, *(_percent(by_figure.get(figure)) for figure in figures)) for name, by_figure in found.items()]
    report.section(
        "`rust_hotpath` against `python`",
        f"{pairs} pairs of fresh servers for each profile, in alternating order; paired differences with Student's t "
        "interval at 95 %. Simulated profiles run no model. Time of the scheduler is that of `schedule` and `commit`.",
        table(("profile", *figures), rows),
    )
    for name, by_figure in found.items():
        steps = {
            variant.name: {part: _mean(runs[name][variant.name], f"{part}_us_per_step") for part in PARTS}
            for variant in VARIANTS
        }
        file = "".join(char if char.isalnum() else "-" for char in name)
        plot = bar_breakdown(report.folder / f"{file}.png", steps, title=f"{name}: a step of the loop", y_label="us")
        flags = " ".join(PROFILES[name].flags)
        report.section(name, f"`{flags}`; load: `{PROFILES[name].load}`.", figures_table(VARIANTS, by_figure), plot)
    loads = {name: PROFILES[name].load for name in runs}
    differences = {name: {k: v.as_dict() for k, v in by_figure.items()} for name, by_figure in found.items()}
    report.write({"loads": loads, "runs": runs, "differences": differences})


def _mean(runs: Sequence[Figures], figure: str) -> float:
    return sum(run.get(figure, 0.0) for run in runs) / len(runs)


if __name__ == "__main__":
    sys.exit(main())
